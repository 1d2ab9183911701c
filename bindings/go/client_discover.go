package pelton

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/handshake"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"golang.org/x/sys/unix"
)

// Discovery of the services of one name. The client reads the name's directory when a link has ended or drains, when
// it has no link for a request, once in a number of submissions, and at intervals while a goroutine waits for space.
// Each handshake has a goroutine of its own.

const (
	// Submissions between two reads of the directory, which costs some microseconds.
	submissionsPerDiscovery = 256
	// Links and handshakes of a client: a process that may create sockets must not use up its descriptors.
	servicesMax = 64
	// Between two reads while a goroutine waits for space, or for a first packet.
	rediscoverAfter = 100 * time.Millisecond
	// Services that may hang up on a connecting client before that is an error.
	hangUpsMax = 16
)

// discovery is used under the client's lock.
type discovery struct {
	// The paths of handshakes under way.
	connecting map[string]bool
	connected  []*clientLink
	// Services that did not answer, refused, or hung up.
	avoided     map[string]avoidance
	submissions int
	// The last read of the directory.
	lastRun time.Time
	// For the next one, while a goroutine waits for space.
	timer *time.Timer
	// Why the last service could not be reached, unless it hung up.
	lastError error
	// How many hung up during the handshake.
	hungUp int
	// Receives at each end of a handshake.
	changed chan struct{}
}

// avoidance is a service that is not tried again before that time, for that reason.
type avoidance struct {
	until time.Time
	err   error
}

func newDiscovery() *discovery {
	return &discovery{connecting: map[string]bool{}, avoided: map[string]avoidance{}, changed: make(chan struct{}, 1)}
}

// takeError returns why services refused this client or could not be reached; nil if there are none.
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

// discover begins a handshake with services that have no link yet, at most this number. It does not wait.
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
	// Clients with only a call or two must be spread too.
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
		// A draining service listens no more: in another pid namespace a new process may have its number.
		if isPassed || of.connecting[path] || slices.ContainsFunc(c.links, isKnown) ||
			slices.ContainsFunc(of.connected, isKnown) {
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
			// It closed, or its process died; a full backlog is a busy service.
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
	s, err := handshake.Connected(ctx, fd, c.settings)
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
		// The next read, some time later, finds whatever listens then.
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

// takeConnected adds the new links.
func (c *Client) takeConnected() {
	if c.discovery != nil {
		c.links = append(c.links, c.discovery.connected...)
		c.discovery.connected = nil
	}
}

// discoverForWaiters is for the leader: it adds the new links, and discovers more while a goroutine waits for space.
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
			c.doorbell.Wake()
		})
	}
}

// countSubmission discovers once in a number of submissions.
func (c *Client) countSubmission() {
	if c.discovery == nil {
		return
	}
	if len(c.discovery.connected) > 0 {
		c.takeConnected()
		c.wakeLeader()
	}
	if c.discovery.submissions++; c.discovery.submissions%submissionsPerDiscovery == 0 {
		// An error appears again when there is no link.
		_ = c.discover(servicesMax)
	}
}

// findOpenLink discovers services when there is no link to send by. It returns true if there is one now.
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

// connectFirst waits for the first link. It tries one service, and another whenever that one has hung up or does not
// answer.
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

// tryConnectFirst returns how long to wait before the next attempt; 0 if there is a link or an error.
func (c *Client) tryConnectFirst() (time.Duration, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	of := c.discovery
	if c.takeConnected(); len(c.links) > 0 {
		// The others connect during its calls.
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
		// Its successor or another service will be here, or none is.
		return retryInterval, nil
	case why != nil && !(c.options.Await && errors.Is(why, ErrTimedOut)):
		return 0, why
	case c.options.Await:
		return retryInterval, nil
	}
	return 0, c.noListener()
}
