package pelton

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"pelton/internal/fail"
)

// The services of one name: a client's way to those that it has no link to yet. The directory of the name is looked at when a link has ended or
// drains, when there is no link to ask by, once in so many submissions, and now and then while something waits for room. Each
// hand-shake goes on in a goroutine of its own.

const (
	// Submissions between two looks at the directory, which costs some microseconds.
	submissionsPerLook = 256
	// Links and hand-shakes of a client at most, lest who may make sockets make it run out of descriptors.
	servicesMax = 64
	// Between two looks while something waits for room, or for a first word.
	lookAgain = 100 * time.Millisecond
	// Services that may hang up on a client that connects, before it takes that for the answer.
	hangUpsMax = 16
)

// crowd is behind the client's lock.
type crowd struct {
	// Where hand-shakes are under way.
	arriving map[string]bool
	arrived  []*clientLink
	// Those that said nothing, refused, or went.
	passed      map[string]passedOver
	submissions int
	// When the directory was looked at last.
	looked time.Time
	// Looked for again, while something waits for room.
	again *time.Timer
	// Why the last one could not be reached, if that was not that it went.
	why error
	// How many went while they were greeted.
	hungUp int
	// Told of each hand-shake's end.
	changed chan struct{}
}

// passedOver is a service that is not greeted again before that time, for that reason.
type passedOver struct {
	until time.Time
	why   error
}

func newCrowd() *crowd {
	return &crowd{arriving: map[string]bool{}, passed: map[string]passedOver{}, changed: make(chan struct{}, 1)}
}

// takeWhy is what those said who do not want this client, or why they could not be reached; nil if nobody is there.
func (of *crowd) takeWhy() error {
	why := of.why
	of.why = nil
	for _, passed := range of.passed {
		why = passed.why
	}
	return why
}

func (c *Client) nobody() error {
	return fail.New(fail.ErrNoListener, "nobody listens at %s: start the service first, or set Await", c.name.place())
}

// lookAround begins a hand-shake with whoever listens and is not known, with so many at most. It does not wait.
func (c *Client) lookAround(most int) error {
	of, now := c.crowd, time.Now()
	of.looked = now
	for path, passed := range of.passed {
		if now.After(passed.until) {
			delete(of.passed, path)
		}
	}
	paths, err := c.name.sockets()
	if err != nil {
		return err
	}
	// Clients that come for a call or two are to be spread too.
	start := 0
	if len(paths) > 0 {
		start = rand.IntN(len(paths))
	}
	for step := range len(paths) {
		path := paths[(start+step)%len(paths)]
		if most == 0 || len(c.links)+len(of.arriving)+len(of.arrived) >= servicesMax {
			break
		}
		isKnown := func(link *clientLink) bool { return link.path == path && link.isOpen() }
		_, isPassed := of.passed[path]
		// Who drains listens no more: in another pid namespace a process of the same number may.
		if isPassed || of.arriving[path] || slices.ContainsFunc(c.links, isKnown) || slices.ContainsFunc(of.arrived, isKnown) {
			continue
		}
		fd, err := connectTo(path)
		switch {
		case err == nil:
			of.arriving[path] = true
			c.greetings.Add(1)
			go c.greet(fd, path)
			most--
		case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ENOENT), errors.Is(err, unix.EAGAIN):
			// Gone, or left behind by a process that died; a full backlog is a service without time.
		default:
			// There may be others.
			of.why = c.name.failed("connecting to", path, err)
		}
	}
	return nil
}

func (c *Client) greet(fd int, path string) {
	defer c.greetings.Done()
	ctx, cancel := context.WithTimeout(c.life, patience)
	defer cancel()
	var link *clientLink
	s, err := newShake(ctx, fd, c.settings)
	if err == nil {
		if link, err = c.newLink(s, path); err != nil {
			s.close()
		}
	}
	c.mutex.Lock()
	of := c.crowd
	delete(of.arriving, path)
	switch {
	case err == nil:
		of.arrived = append(of.arrived, link)
		of.why = nil
	case errors.Is(err, ErrHungUp):
		// Who went, went: another look, not at once, finds whoever is there now.
		of.hungUp++
		of.passed[path] = passedOver{time.Now().Add(retry), err}
	case errors.Is(err, context.DeadlineExceeded):
		// It may live, but it does not serve.
		why := fail.New(fail.ErrTimedOut, "timed out while greeting the service at %s, which does not answer", path)
		of.passed[path] = passedOver{time.Now().Add(patience), why}
	default:
		of.passed[path] = passedOver{time.Now().Add(lookAgain), err}
	}
	c.rouse()
	c.mutex.Unlock()
	select {
	case of.changed <- struct{}{}:
	default:
	}
}

// admit takes in those who have been greeted.
func (c *Client) admit() {
	if c.crowd != nil {
		c.links = append(c.links, c.crowd.arrived...)
		c.crowd.arrived = nil
	}
}

// attend is for who leads: takes in those who have come, and looks for others while somebody waits for room.
func (c *Client) attend(w *waiter) {
	of := c.crowd
	c.admit()
	isRoomWanted := len(c.rooms) > 0 || len(c.homeless) > 0 || w != nil && w.what != anAnswer
	if !isRoomWanted {
		return
	}
	if time.Since(of.looked) >= lookAgain {
		_ = c.lookAround(servicesMax)
	}
	if of.again == nil {
		of.again = time.AfterFunc(lookAgain, func() {
			c.mutex.Lock()
			of.again = nil
			c.mutex.Unlock()
			c.bell.kick()
		})
	}
}

// countSubmission has others looked for now and then.
func (c *Client) countSubmission() {
	if c.crowd == nil {
		return
	}
	if len(c.crowd.arrived) > 0 {
		c.admit()
		c.rouse()
	}
	if c.crowd.submissions++; c.crowd.submissions%submissionsPerLook == 0 {
		// There is one to ask by: what goes wrong is found again when there is none.
		_ = c.lookAround(servicesMax)
	}
}

// findSomebody looks for others: there is no link to write by. True: there is one now.
func (c *Client) findSomebody() (bool, error) {
	c.admit()
	isOpen := func(link *clientLink) bool { return link.isOpen() }
	if slices.ContainsFunc(c.links, isOpen) {
		return true, nil
	}
	if err := c.lookAround(servicesMax); err != nil {
		return false, err
	}
	if len(c.crowd.arriving) > 0 {
		return false, nil
	}
	if why := c.crowd.takeWhy(); why != nil {
		return false, why
	}
	return false, c.nobody()
}

// findFirst waits for the first link: greets one service, and another whenever that one has gone, or said nothing for some time.
func (c *Client) findFirst(ctx context.Context) error {
	limited, cancel := ctx, context.CancelFunc(func() {})
	if !c.options.Await {
		limited, cancel = context.WithTimeout(ctx, patience)
	}
	defer cancel()
	for {
		pause, err := c.findOneMore()
		if pause == 0 {
			return err
		}
		select {
		case <-limited.Done():
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return fail.New(fail.ErrTimedOut, "timed out while waiting for a service at %s to answer", c.name.place())
		case <-c.crowd.changed:
		case <-time.After(pause):
		}
	}
}

// findOneMore answers how long to wait before the next time; 0: there is a link, or an error.
func (c *Client) findOneMore() (time.Duration, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	of := c.crowd
	if c.admit(); len(c.links) > 0 {
		// The others come beside its calls.
		return 0, c.lookAround(servicesMax)
	}
	if len(of.arriving) == 0 || time.Since(of.looked) >= lookAgain {
		if err := c.lookAround(1); err != nil {
			return 0, err
		}
	}
	if len(of.arriving) > 0 {
		return lookAgain, nil
	}
	switch why := of.takeWhy(); {
	case errors.Is(why, ErrHungUp) && (of.hungUp < hangUpsMax || c.options.Await):
		// Its successor will be here, or another, or nobody is.
		return retry, nil
	case why != nil && !(c.options.Await && errors.Is(why, ErrTimedOut)):
		return 0, why
	case c.options.Await:
		return retry, nil
	}
	return 0, c.nobody()
}
