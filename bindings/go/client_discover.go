package pelton

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"pelton/internal/fail"
	"pelton/internal/handshake"
	"pelton/internal/kernel"
)

// The services of one name: a client's way to those that it has no link to yet. The directory of the name is looked at when a link has ended or
// drains, when there is no link to ask by, once in so many submissions, and now and then while something waits for room. Each
// hand-shake goes on in a goroutine of its own.

const (
	// Submissions between two looks at the directory, which costs some microseconds.
	submissionsPerDiscovery = 256
	// Links and hand-shakes of a client at most, lest who may make sockets make it run out of descriptors.
	servicesMax = 64
	// Between two looks while something waits for room, or for a first word.
	rediscoverAfter = 100 * time.Millisecond
	// Services that may hang up on a client that connects, before it takes that for the answer.
	hangUpsMax = 16
)

// discovery is behind the client's lock.
type discovery struct {
	// Where hand-shakes are under way.
	connecting map[string]bool
	connected  []*clientLink
	// Those that said nothing, refused, or went.
	avoided     map[string]avoidance
	submissions int
	// When the directory was looked at last.
	lastRun time.Time
	// Looked for again, while something waits for room.
	timer *time.Timer
	// Why the last one could not be reached, if that was not that it went.
	lastError error
	// How many went while they were greeted.
	hungUp int
	// Told of each hand-shake's end.
	changed chan struct{}
}

// avoidance is a service that is not greeted again before that time, for that reason.
type avoidance struct {
	until time.Time
	err   error
}

func newDiscovery() *discovery {
	return &discovery{connecting: map[string]bool{}, avoided: map[string]avoidance{}, changed: make(chan struct{}, 1)}
}

// takeError is what those said who do not want this client, or why they could not be reached; nil if nobody is there.
func (of *discovery) takeError() error {
	why := of.lastError
	of.lastError = nil
	for _, passed := range of.avoided {
		why = passed.err
	}
	return why
}

func (c *Client) noListener() error {
	return fail.New(fail.ErrNoListener, "nobody listens at %s: start the service first, or set Await", c.name.Where())
}

// discover begins a hand-shake with whoever listens and is not known, with so many at most. It does not wait.
func (c *Client) discover(most int) error {
	of, now := c.discovery, time.Now()
	of.lastRun = now
	for path, passed := range of.avoided {
		if now.After(passed.until) {
			delete(of.avoided, path)
		}
	}
	paths, err := c.name.Sockets()
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
		if most == 0 || len(c.links)+len(of.connecting)+len(of.connected) >= servicesMax {
			break
		}
		isKnown := func(link *clientLink) bool { return link.path == path && link.isOpen() }
		_, isPassed := of.avoided[path]
		// Who drains listens no more: in another pid namespace a process of the same number may.
		if isPassed || of.connecting[path] || slices.ContainsFunc(c.links, isKnown) || slices.ContainsFunc(of.connected, isKnown) {
			continue
		}
		fd, err := kernel.ConnectTo(path)
		switch {
		case err == nil:
			of.connecting[path] = true
			c.handshakes.Add(1)
			go c.handshake(fd, path)
			most--
		case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ENOENT), errors.Is(err, unix.EAGAIN):
			// Gone, or left behind by a process that died; a full backlog is a service without time.
		default:
			// There may be others.
			of.lastError = c.name.Failed("connecting to", path, err)
		}
	}
	return nil
}

func (c *Client) handshake(fd int, path string) {
	defer c.handshakes.Done()
	ctx, cancel := context.WithTimeout(c.context, handshakeTimeout)
	defer cancel()
	var link *clientLink
	s, err := handshake.New(ctx, fd, c.settings)
	if err == nil {
		if link, err = c.newLink(s, path); err != nil {
			s.Close()
		}
	}
	c.mutex.Lock()
	of := c.discovery
	delete(of.connecting, path)
	switch {
	case err == nil:
		of.connected = append(of.connected, link)
		of.lastError = nil
	case errors.Is(err, ErrHungUp):
		// Who went, went: another look, not at once, finds whoever is there now.
		of.hungUp++
		of.avoided[path] = avoidance{time.Now().Add(retryInterval), err}
	case errors.Is(err, context.DeadlineExceeded):
		// It may live, but it does not serve.
		why := fail.New(fail.ErrTimedOut, "timed out while greeting the service at %s, which does not answer", path)
		of.avoided[path] = avoidance{time.Now().Add(handshakeTimeout), why}
	default:
		of.avoided[path] = avoidance{time.Now().Add(rediscoverAfter), err}
	}
	c.wakeLeader()
	c.mutex.Unlock()
	select {
	case of.changed <- struct{}{}:
	default:
	}
}

// takeConnected takes in those who have been greeted.
func (c *Client) takeConnected() {
	if c.discovery != nil {
		c.links = append(c.links, c.discovery.connected...)
		c.discovery.connected = nil
	}
}

// discoverForWaiters is for who leads: takes in those who have come, and looks for others while somebody waits for room.
func (c *Client) discoverForWaiters(w *waiter) {
	of := c.discovery
	c.takeConnected()
	isRoomWanted := len(c.spaceWaiters) > 0 || len(c.unrouted) > 0 || w != nil && w.what != waitAnswer
	if !isRoomWanted {
		return
	}
	if time.Since(of.lastRun) >= rediscoverAfter {
		_ = c.discover(servicesMax)
	}
	if of.timer == nil {
		of.timer = time.AfterFunc(rediscoverAfter, func() {
			c.mutex.Lock()
			of.timer = nil
			c.mutex.Unlock()
			c.bell.Wake()
		})
	}
}

// countSubmission has others looked for now and then.
func (c *Client) countSubmission() {
	if c.discovery == nil {
		return
	}
	if len(c.discovery.connected) > 0 {
		c.takeConnected()
		c.wakeLeader()
	}
	if c.discovery.submissions++; c.discovery.submissions%submissionsPerDiscovery == 0 {
		// There is one to ask by: what goes wrong is found again when there is none.
		_ = c.discover(servicesMax)
	}
}

// findOpenLink looks for others: there is no link to write by. True: there is one now.
func (c *Client) findOpenLink() (bool, error) {
	c.takeConnected()
	isOpen := func(link *clientLink) bool { return link.isOpen() }
	if slices.ContainsFunc(c.links, isOpen) {
		return true, nil
	}
	if err := c.discover(servicesMax); err != nil {
		return false, err
	}
	if len(c.discovery.connecting) > 0 {
		return false, nil
	}
	if why := c.discovery.takeError(); why != nil {
		return false, why
	}
	return false, c.noListener()
}

// connectFirst waits for the first link: greets one service, and another whenever that one has gone, or said nothing for some time.
func (c *Client) connectFirst(ctx context.Context) error {
	limited, cancel := ctx, context.CancelFunc(func() {})
	if !c.options.Await {
		limited, cancel = context.WithTimeout(ctx, handshakeTimeout)
	}
	defer cancel()
	for {
		pause, err := c.tryConnectFirst()
		if pause == 0 {
			return err
		}
		select {
		case <-limited.Done():
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return fail.New(fail.ErrTimedOut, "timed out while waiting for a service at %s to answer", c.name.Where())
		case <-c.discovery.changed:
		case <-time.After(pause):
		}
	}
}

// tryConnectFirst answers how long to wait before the next time; 0: there is a link, or an error.
func (c *Client) tryConnectFirst() (time.Duration, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	of := c.discovery
	if c.takeConnected(); len(c.links) > 0 {
		// The others come beside its calls.
		return 0, c.discover(servicesMax)
	}
	if len(of.connecting) == 0 || time.Since(of.lastRun) >= rediscoverAfter {
		if err := c.discover(1); err != nil {
			return 0, err
		}
	}
	if len(of.connecting) > 0 {
		return rediscoverAfter, nil
	}
	switch why := of.takeError(); {
	case errors.Is(why, ErrHungUp) && (of.hungUp < hangUpsMax || c.options.Await):
		// Its successor will be here, or another, or nobody is.
		return retryInterval, nil
	case why != nil && !(c.options.Await && errors.Is(why, ErrTimedOut)):
		return 0, why
	case c.options.Await:
		return retryInterval, nil
	}
	return 0, c.noListener()
}
