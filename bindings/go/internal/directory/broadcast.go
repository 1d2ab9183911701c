package directory

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"github.com/pelton-ipc/pelton/bindings/go/internal/doorbell"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
	"github.com/pelton-ipc/pelton/bindings/go/internal/link"
	"github.com/pelton-ipc/pelton/bindings/go/internal/memory"
	"golang.org/x/sys/unix"
)

// The files of a broadcast, beside channel: spec/broadcast.md, "By path". The publisher's role is the lock of its page.
// A subscriber's is the lock of a byte of the table, one for each slot. A slot is assigned by its lock alone. Only a
// process that has the growth lock names one, so a durable name has one slot.
const (
	publisherFile, tableFile, dataFile   = "publisher", "cursors", "data"
	publisherDoorbell, publisherLiveness = publisherFile + "." + DoorbellFile, publisherFile + "." + LivenessFile
)

// OpenBroadcast checks and opens the broadcast at a path. It returns nil if nothing is there.
func OpenBroadcast(path string, access Access) (*Directory, error) { return open(path, access, true) }

// CreateBroadcast creates the broadcast, or opens an existing one with the sizes that it was created with.
func CreateBroadcast(path string, access Access, makes limits.Limits) (*Directory, error) {
	return create(path, access, channelHeader{capacity: makes.LaneBytes, bytesMax: makes.MessageBytes, lanesMax: 1,
		isBroadcast: true})
}

// makeBroadcast creates all files but channel.
func (d *Directory) makeBroadcast() error {
	page, table := aligned(4096), aligned(4096)
	lane.MakeBroadcastPage(page, d.header.capacity, d.header.bytesMax, 0)
	lane.SetBootID(page, d.header.bootID)
	lane.MakeUnused(page)
	lane.MakeTable(table)
	// A subscriber allocates its cursor before it first writes there.
	return d.makeFiles(publisherFile, newFile{publisherFile, lane.SegmentBytes, page, 0},
		newFile{tableFile, lane.TableBytes, table, lane.TableEntriesBytes}, d.dataFile(dataFile))
}

func (d *Directory) publisherPage(writable bool) (*memory.Segment, error) {
	return d.producerOf(publisherFile, lane.MagicBroadcast, lane.CursorsMax, writable)
}

func (d *Directory) table() (*memory.Segment, error) {
	return d.control(tableFile, lane.MagicTable, true)
}

func always() (bool, error) { return true, nil }

// Publication is the publisher's part of a broadcast.
type Publication struct {
	Lane              *lane.BroadcastProducer
	Page, Data, Table *memory.Segment
	Doorbell          *doorbell.Own
	Role              *Role
	// Its limit stays. Otherwise its end restores that of the one before.
	HasBegun    bool
	formerLimit lane.HoldLimit
}

// OpenPublisher claims the role of the publisher, and takes over the lane. It waits as claim does for the role, and for
// subscribers beyond the limit to leave. It owns d. The caller then sets HasBegun, unless it fails.
func (d *Directory) OpenPublisher(ctx context.Context, isPatient bool, limit lane.HoldLimit) (_ *Publication,
	failed error) {
	h := &claim{directory: d, lock: -1}
	defer h.release()
	canBarrier := kernel.Membarrier()
	p := &Publication{}
	if p.Table = h.segment(d.table()); h.err != nil {
		return nil, h.err
	}
	refusal := ""
	var err error
	// It has the role during an attempt only: another publisher may admit what this one does not.
	h.lock, err = d.claim(ctx, isPatient, func() (int, error) {
		refusal = ""
		lock, err := d.lock(publisherFile, false)
		if err != nil || lock < 0 {
			return lock, err
		}
		if refusal, err = p.limitHolds(d, limit); err != nil || refusal != "" {
			unlock(lock)
			return -1, err
		}
		return lock, nil
	}, always)
	switch {
	case err != nil:
		return nil, err
	case refusal != "":
		return nil, fail.With(ctx.Err(), fail.ErrRefused, "%s", refusal)
	case h.lock < 0:
		return nil, d.taken(ctx, "publisher", d.pid(publisherFile, 388))
	}
	defer func() {
		if failed != nil {
			p.restoreLimit()
		}
	}()
	p.Page = h.segment(d.publisherPage(true))
	p.Data = h.segment(d.segment(dataFile, d.header.capacity, true))
	own := h.fifo(publisherDoorbell, unix.O_RDWR)
	life := h.fifo(publisherLiveness, unix.O_RDONLY)
	if h.err != nil {
		return nil, h.err
	}
	if p.Doorbell, err = doorbell.NewFIFO(h.Claim(own)); err != nil {
		return nil, err
	}
	p.Lane, err = lane.TakeOverBroadcastProducer(lane.BroadcastMemory{Producer: p.Page.Bytes, Data: p.Data.Bytes},
		p.Table.Bytes, d.header.bytesMax, canBarrier, uint32(os.Getpid()))
	if err != nil {
		p.Doorbell.Close()
		return nil, fail.Lane(err)
	}
	h.Keep()
	h.directory = nil
	p.Page.ForgetDescriptor()
	p.Table.ForgetDescriptor()
	p.Role = &Role{Directory: d, lock: h.lock, liveness: life}
	return p, nil
}

// limitHolds stores the limit of a publisher that begins, whose role the caller has. If a subscription may hold it up
// for longer, the former limit stays, and the refusal says which one that is, and what to do.
func (p *Publication) limitHolds(d *Directory, limit lane.HoldLimit) (refusal string, err error) {
	// First without a store: subscribers must not find the limit of a publisher that does not begin.
	if refusal, err = d.checkHolds(p.Table, limit); refusal != "" || err != nil {
		return refusal, err
	}
	table := lane.Table(p.Table.Bytes)
	p.formerLimit = table.HoldLimit()
	table.SetHoldLimit(limit)
	if refusal, err = d.checkHolds(p.Table, limit); refusal != "" || err != nil {
		p.restoreLimit()
	}
	return refusal, err
}

func (d *Directory) checkHolds(of *memory.Segment, limit lane.HoldLimit) (refusal string, err error) {
	table := lane.Table(of.Bytes)
	for slot := range uint32(lane.CursorsMax) {
		if !table.HoldsLonger(slot, limit) {
			continue
		}
		// The lock first: once it is free, what its process has stored is visible.
		isHeld, err := d.isByteLocked(of.FD, tableFile, int64(slot))
		if err != nil {
			return "", err
		}
		name, user, most := table.Slot(slot).Name, "no process", limit.Duration()
		if isHeld {
			user = process(lane.CursorPID(table.Cursor(slot)))
		}
		switch {
		case name != "" && (isHeld || table.HasBegun(slot)):
			return fmt.Sprintf("the durable subscription %q of %s, which %s uses, may hold the publisher up for longer than %v: raise HoldMax, or continue the subscription by Lag, or with a LagAfter of at most %v, or remove it by RemoveSubscription",
				name, d.Path, user, most, most), nil
		case name == "" && isHeld:
			return fmt.Sprintf("a subscriber of %s, %s, may hold the publisher up for longer than %v: raise HoldMax, or end it",
				d.Path, user, most), nil
		}
		// It is dead, and the publisher will remove it.
	}
	return "", nil
}

func (p *Publication) restoreLimit() { lane.Table(p.Table.Bytes).SetHoldLimit(p.formerLimit) }

// Meet returns the link to the process of a subscriber that has joined by itself, and rings it: it may have fallen
// asleep before this side knew its doorbell. Without a peer in the link, no process uses the subscription now.
func (p *Publication) Meet(of lane.ByItself, wake func()) (*link.Link, error) {
	d := p.Role.Directory
	fd, err := d.open(ofSlot(of.Slot, DoorbellFile), unix.S_IFIFO, unix.O_RDWR)
	if err != nil {
		return nil, err
	}
	cursor := lane.Table(p.Table.Bytes).Cursor(of.Slot)
	says := func() (uint64, uint32) { return of.Generation, lane.CursorPID(cursor) }
	l := d.newLink(ofSlot(of.Slot, LivenessFile), says, fd, wake)
	if _, err := l.Find(); err != nil {
		l.Close()
		return nil, err
	}
	l.Ring()
	return l, nil
}

// Durable returns the name of the durable subscription of a slot; "": none. Hostile bytes are none.
func (p *Publication) Durable(slot uint32) string {
	name := lane.Table(p.Table.Bytes).Slot(slot).Name
	if CheckDurable(name) != nil {
		return ""
	}
	return name
}

// KeepsPlace reports whether the subscriber of a slot, whose process has gone, keeps its place: it has a name, and had
// begun.
func (p *Publication) KeepsPlace(slot uint32) bool {
	table := lane.Table(p.Table.Bytes)
	return table.Slot(slot).Name != "" && table.HasBegun(slot)
}

// Close ends the publisher's use of the directory, after its lane is closed.
func (p *Publication) Close() {
	if !p.HasBegun {
		p.restoreLimit()
	}
	p.Role.Close()
	p.Table.Close()
}

// CheckDurable checks the name of a durable subscription.
func CheckDurable(name string) error {
	isValid := name != "" && len(name) <= lane.DurableBytesMax
	for _, c := range []byte(name) {
		isValid = isValid && (c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' ||
			c == '_' || c == '-')
	}
	if isValid {
		return nil
	}
	return fail.New(fail.ErrName, "%q is no durable name: use 1 to %d letters, digits, '.', '_' or '-'", name,
		lane.DurableBytesMax)
}

func ofSlot(slot uint32, kind string) string { return ofLane(int(slot), kind) }

// OpenSubscriber claims a slot, for which it waits as claim does, and joins there: the slot of the durable name, or any
// other. It owns d. continues: an earlier process has begun the durable subscription.
func (d *Directory) OpenSubscriber(ctx context.Context, isPatient bool, durable string, policy lane.Policy,
	from lane.From) (sub *link.Subscription, own *doorbell.Own, role *Role, continues bool, err error) {
	h := &claim{directory: d, lock: -1}
	defer h.release()
	canBarrier := kernel.Membarrier()
	sub = &link.Subscription{}
	if sub.Cursor = h.segment(d.table()); h.err != nil {
		return nil, nil, nil, false, h.err
	}
	table := lane.Table(sub.Cursor.Bytes)
	slot, lock, err := d.claimSlot(ctx, isPatient, table, durable, policy)
	if err != nil {
		return nil, nil, nil, false, err
	}
	h.lock = lock
	at := lane.CursorOffset(slot)
	err = d.failed("allocating", tableFile, allocate(sub.Cursor.FD, at, at+lane.CursorBytes))
	if err == nil {
		err = d.ensureFIFOs(slot)
	}
	if err != nil {
		return nil, nil, nil, false, err
	}
	sub.Page = h.segment(d.publisherPage(false))
	sub.Data = h.segment(d.segment(dataFile, d.header.capacity, false))
	ownFIFO := h.fifo(ofSlot(slot, DoorbellFile), unix.O_RDWR)
	peers := h.fifo(publisherDoorbell, unix.O_RDWR)
	life := h.fifo(ofSlot(slot, LivenessFile), unix.O_RDONLY)
	if h.err != nil {
		return nil, nil, nil, false, h.err
	}
	if durable != "" {
		var former lane.Policy
		if former, continues = table.ContinuedPolicy(slot); continues && policy.Kind == lane.Gate && former.Kind != lane.Gate {
			by := "Gate with LagAfter"
			if former.HoldsNS() == 0 {
				by = "Lag"
			}
			return nil, nil, nil, false, fail.New(fail.ErrRefused, "the durable subscription %q of %s is by %s, and may have missed messages: subscribe by that again, or remove it to begin anew by Gate", durable, d.Path, by)
		}
	}
	joining := lane.JoinByPath{Slot: slot, Policy: policy, From: from, IsDurable: durable != "", PID: uint32(os.Getpid())}
	sub.Consumer, err = lane.JoinBroadcast(lane.BroadcastMemory{Producer: sub.Page.Bytes, Data: sub.Data.Bytes}, table,
		joining, d.header.bytesMax, canBarrier)
	if err != nil {
		// It may have counted this side.
		d.ringPublisher()
		if tooLong, ok := errors.AsType[*lane.HoldsTooLong](err); ok {
			if durable != "" {
				d.forgetDurable(ctx, table, slot)
			}
			return nil, nil, nil, false, d.refuseHold(tooLong)
		}
		return nil, nil, nil, false, fail.Lane(err)
	}
	if own, err = doorbell.NewFIFO(h.Claim(ownFIFO)); err != nil {
		return nil, nil, nil, false, err
	}
	h.Keep()
	h.directory = nil
	for _, segment := range []*memory.Segment{sub.Page, sub.Data, sub.Cursor} {
		segment.ForgetDescriptor()
	}
	sub.Link = d.newLink(publisherLiveness, sub.Consumer.Publisher, peers, own.Wake)
	return sub, own, &Role{Directory: d, lock: lock, liveness: life}, continues, nil
}

// claimSlot returns the slot and its lock.
func (d *Directory) claimSlot(ctx context.Context, isPatient bool, table lane.Table, durable string,
	policy lane.Policy) (slot uint32, lock int, err error) {
	isGrowing := false
	lock, err = d.claim(ctx, isPatient, func() (int, error) {
		// Before any store. It may come while this waits.
		if err := table.HoldLimit().Check(policy); err != nil {
			return -1, d.refuseHold(err)
		}
		if durable == "" {
			slot, lock, err = d.claimFreeSlot(table)
			return lock, err
		}
		// Not by a wait for the lock, because a stopped process may hold it.
		growth, err := d.lock("channel", false)
		if isGrowing = growth < 0; isGrowing || err != nil {
			return -1, err
		}
		defer unlock(growth)
		slot, lock, err = d.claimNamedSlot(table, durable)
		return lock, err
	}, always)
	switch {
	case err != nil || lock >= 0:
		return slot, lock, err
	case isGrowing:
		return 0, -1, d.namesAreLocked(ctx)
	}
	if found, ok := durableSlot(table, durable); ok {
		return 0, -1, d.slotTaken(ctx, table, found)
	}
	return 0, -1, fail.With(ctx.Err(), fail.ErrRefused, "%s has %d subscribers and durable subscriptions, as many as a lane takes: close one, or remove one", d.Path, lane.CursorsMax)
}

// refuseHold returns the error of a subscriber that may hold the publisher up for too long.
func (d *Directory) refuseHold(tooLong error) error {
	return fail.New(fail.ErrRefused, "%s: %v", d.Path, tooLong)
}

// forgetDurable frees the name of a durable subscription that has not begun. The caller has the slot's lock. If another
// process keeps the growth lock, the name stays, for the next one that opens or removes it.
func (d *Directory) forgetDurable(ctx context.Context, table lane.Table, slot uint32) {
	growth, err := d.claim(ctx, false, func() (int, error) { return d.lock("channel", false) }, always)
	if err != nil || growth < 0 {
		return
	}
	defer unlock(growth)
	if !table.HasBegun(slot) {
		table.SetName(slot, "")
	}
}

// claimFreeSlot returns -1 if there is none.
func (d *Directory) claimFreeSlot(table lane.Table) (uint32, int, error) {
	var refused error
	for slot := range uint32(lane.CursorsMax) {
		if table.Slot(slot).Name != "" {
			continue
		}
		lock, err := d.lockByte(tableFile, int64(slot), false)
		if err != nil {
			return 0, -1, err
		}
		if lock < 0 {
			continue
		}
		found := table.Slot(slot)
		if found.Name != "" {
			// Another process has named it, and has ended, before this one had the lock.
			unlock(lock)
			continue
		}
		if found.IsCounted {
			// Its process has died. The publisher may not have noticed that, and must not take this one's life for the dead
			// one's.
			table.Detach(slot)
			d.ringPublisher()
		}
		if err = d.ensureFIFOs(slot); err == nil {
			return slot, lock, nil
		}
		unlock(lock)
		// They belong to a user whom this side does not permit, or to one whose process was killed while it made them.
		if !errors.Is(err, fail.ErrNotAChannel) {
			return 0, -1, err
		}
		if refused == nil {
			refused = err
		}
	}
	return 0, -1, refused
}

// claimNamedSlot is called under the growth lock.
func (d *Directory) claimNamedSlot(table lane.Table, durable string) (uint32, int, error) {
	if slot, ok := durableSlot(table, durable); ok {
		lock, err := d.lockByte(tableFile, int64(slot), false)
		return slot, lock, err
	}
	slot, lock, err := d.claimFreeSlot(table)
	if err == nil && lock >= 0 {
		// A subscriber of before may have died here. The publisher must not take its cursor for the durable one's.
		table.Detach(slot)
		table.SetName(slot, durable)
	}
	return slot, lock, err
}

func durableSlot(table lane.Table, durable string) (uint32, bool) {
	for slot := range uint32(lane.CursorsMax) {
		if durable != "" && table.Slot(slot).Name == durable {
			return slot, true
		}
	}
	return 0, false
}

// ensureFIFOs makes the FIFOs of a slot that are missing, and checks the others. The caller has the slot's lock.
func (d *Directory) ensureFIFOs(slot uint32) error {
	for _, kind := range []string{DoorbellFile, LivenessFile} {
		name := ofSlot(slot, kind)
		var stat unix.Stat_t
		err := unix.Fstatat(d.fd, name, &stat, unix.AT_SYMLINK_NOFOLLOW)
		switch {
		case err == unix.ENOENT:
			err = d.makeFIFO(name)
		// A process died while it made it.
		case err == nil && int(stat.Uid) == os.Geteuid() && stat.Mode&unix.S_IFMT == unix.S_IFIFO &&
			stat.Mode&0o777 != d.bits:
			err = d.permitFIFO(name)
		default:
			err = nil
		}
		if err != nil {
			return err
		}
		fd, err := d.open(name, unix.S_IFIFO, unix.O_RDWR)
		if err != nil {
			return err
		}
		unix.Close(fd)
	}
	return nil
}

// ringPublisher rings the publisher, if its doorbell can be opened.
func (d *Directory) ringPublisher() {
	if fd, err := d.open(publisherDoorbell, unix.S_IFIFO, unix.O_RDWR); err == nil {
		of := doorbell.Peer{FD: fd, Kind: doorbell.FIFO}
		of.Ring()
		of.Close(kernel.UnknownUser)
	}
}

// RemoveDurable removes a durable subscription that no process uses. It waits for the growth lock for [ClaimKilled].
func (d *Directory) RemoveDurable(name string) error {
	s, err := d.table()
	if err != nil {
		return err
	}
	defer s.Close()
	table, ctx := lane.Table(s.Bytes), context.Background()
	growth, err := d.claim(ctx, false, func() (int, error) { return d.lock("channel", false) }, always)
	if err != nil {
		return err
	}
	if growth < 0 {
		return d.namesAreLocked(ctx)
	}
	defer unlock(growth)
	slot, ok := durableSlot(table, name)
	if !ok {
		return fail.New(fail.ErrRefused, "%s has no durable subscription %q", d.Path, name)
	}
	lock, err := d.lockByte(tableFile, int64(slot), false)
	if err != nil {
		return err
	}
	if lock < 0 {
		return d.slotTaken(ctx, table, slot)
	}
	defer unlock(lock)
	// First: an unnamed subscriber may claim the slot once it has no name. And a process that is killed here leaves the
	// name, so that the next one removes it, and rings.
	table.Detach(slot)
	d.ringPublisher()
	table.SetName(slot, "")
	return nil
}

func (d *Directory) namesAreLocked(ctx context.Context) error {
	return fail.With(ctx.Err(), fail.ErrTimedOut,
		"timed out while a process opens or removes a durable subscription of %s: see whether it is stopped", d.Path)
}

func (d *Directory) slotTaken(ctx context.Context, table lane.Table, slot uint32) error {
	role := "subscriber of the durable name " + strconv.Quote(table.Slot(slot).Name)
	return d.taken(ctx, role, lane.CursorPID(table.Cursor(slot)))
}
