//! The client of a service.

use crate::c::{Bytes, Info, New, Options, Out, Text, check_size, sized_structures, structures, text};
use crate::code::{self, Answer, armed, done, found, is_done, sent, wrong};
use crate::entries::entries;
use crate::handle::{Kind, Object};
use crate::opening::{Opened, Opening};
use crate::options::ClientOptions;
use crate::writer::check_used;
use pelton::raw::{RawCompletion, RawRequestReservation};
use pelton::{CallId, Completion, Deadline, Loss, Outcome, Sent, Traceparent};
use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;

pub struct Client {
    inner: pelton::Client,
    /// Taken and not released: meanwhile no other completion is taken.
    taken: Option<RawCompletion>,
    /// The reserved space, and its size: meanwhile nothing else is submitted. Dropping it aborts.
    reserved: Option<(RawRequestReservation, usize)>,
}

impl Client {
    fn new(inner: pelton::Client) -> Client {
        Client { inner, taken: None, reserved: None }
    }

    /// The client, for calls that would move what is reserved or was taken: the lanes of a service that has ended go.
    fn unused(&mut self) -> Answer<&mut pelton::Client> {
        match (&self.reserved, &self.taken) {
            (Some(_), _) => Err(code::plain(code::RESERVED)),
            (None, Some(_)) => Err(code::plain(code::NOT_RELEASED)),
            (None, None) => Ok(&mut self.inner),
        }
    }

    /// Marks a call that may be carried out twice.
    fn mark(&mut self, call: CallId, flags: Flags) -> Answer {
        if let Flags::Idempotent = flags {
            // False: it is lost already, as its completion says.
            done(self.inner.mark_idempotent(call))?;
        }
        Ok(())
    }
}

impl Object for Client {
    const KIND: Kind = Kind::Client;

    fn is_forked(&self) -> bool {
        self.inner.is_forked()
    }
}

impl Opened for Client {
    type Inner = pelton::Client;
    const OPENING: Kind = Kind::ClientOpening;
}

/// The flags of a call.
enum Flags {
    None,
    Idempotent,
}

impl Flags {
    fn of(flags: u32) -> Answer<Flags> {
        match flags {
            0 => Ok(Flags::None),
            1 => Ok(Flags::Idempotent),
            found => Err(wrong("flags", found, "0 or PELTON_IDEMPOTENT (1)")),
        }
    }
}

/// `enum pelton_outcome`.
#[repr(u32)]
enum COutcome {
    Reply = 1,
    Part = 2,
    End = 3,
    Failed = 4,
    Abandoned = 5,
    Lost = 6,
}

structures! {
    "pelton_completion" CCompletion {
        call: u64,
        data: *const c_void,
        size: usize,
        outcome: COutcome,
        code: u32,
    }
}

impl CCompletion {
    fn of(completion: &Completion<'_>) -> CCompletion {
        let (data, size) = completion.raw_parts();
        let (outcome, code) = match completion.outcome() {
            Outcome::Reply => (COutcome::Reply, 0),
            Outcome::Part => (COutcome::Part, 0),
            Outcome::End => (COutcome::End, 0),
            Outcome::Failed(code) => (COutcome::Failed, code),
            Outcome::Abandoned => (COutcome::Abandoned, 0),
            Outcome::Lost(loss) => (COutcome::Lost, loss_code(loss) as u32),
        };
        CCompletion { call: completion.call_id().to_bits(), data: data.as_ptr().cast(), size, outcome, code }
    }
}

/// The code of a call that was lost.
fn loss_code(loss: Loss) -> c_int {
    match loss {
        Loss::PeerDied => code::PEER_DIED,
        Loss::Closed => code::CLOSED,
        Loss::Corrupt => code::CORRUPT,
        Loss::Returned => code::AGAIN,
    }
}

/// Takes a completion, which stays until it is released.
fn take(
    client: &mut Client,
    completion: impl FnOnce(&mut pelton::Client) -> Answer<Completion<'_>>,
) -> Answer<CCompletion> {
    client.unused()?;
    let completion = completion(&mut client.inner)?;
    let shown = CCompletion::of(&completion);
    client.taken = Some(completion.into_raw());
    Ok(shown)
}

sized_structures! {
    "pelton_client_info" ClientInfo {
        has_peer: u32,
        peer_pid: u32,
        peer_uid: u32,
        request_bytes_max: u64,
        services: u64,
        in_flight: u64,
        dropped: u64,
        wakes_sent: u64,
    }
}

entries! {
    fn pelton_client_open(name: Text, options: Options<ClientOptions>, out: New<Client>) {
        out.give(Client::new(done(pelton::Client::connect_with(text(name)?, &options.build()?))?))
    }

    fn pelton_client_open_start(name: Text, options: Options<ClientOptions>, out: New<Opening<Client>>) {
        out.give(Opening::new(done(pelton::Client::start_connect(text(name)?, &options.build()?))?))
    }

    fn pelton_client_opening_fd(opening: &mut Opening<Client>) {
        Ok(opening.fd())
    }

    fn pelton_client_opening_finish(opening: &mut Opening<Client>, out: New<Client>) {
        out.give(Client::new(opening.finish()?))
    }

    fn pelton_client_call(client: &mut Client, data[size]: Bytes, deadline_ns: Deadline, out: Out<CCompletion>) {
        out.write(take(client, |client| match deadline_ns {
            Deadline::Never => done(client.call(data)),
            deadline => found(client.call_until(data, deadline)),
        })?);
        Ok(())
    }

    fn pelton_client_submit(
        client: &mut Client,
        data[size]: Bytes,
        flags: u32,
        deadline_ns: Deadline,
        out_call: Out<u64>,
    ) {
        let flags = Flags::of(flags)?;
        let inner = client.unused()?;
        let call = match deadline_ns {
            Deadline::Now => found(inner.try_submit(data)),
            Deadline::At(deadline) => found(inner.submit_until(data, deadline)),
            Deadline::Never => done(inner.submit(data)),
        }?;
        client.mark(call, flags)?;
        out_call.write(call.to_bits());
        Ok(())
    }

    fn pelton_client_submit_traced(
        client: &mut Client,
        data[size]: Bytes,
        traceparent: Option<Text>,
        flags: u32,
        deadline_ns: Deadline,
        out_call: Out<u64>,
    ) {
        let flags = Flags::of(flags)?;
        let inner = client.unused()?;
        let call = match traceparent.and_then(|text| Traceparent::parse(text.to_bytes())) {
            Some(traceparent) => found(inner.submit_traced(data, traceparent, deadline_ns)),
            // W3C: as if there were none.
            None => found(inner.submit_until(data, deadline_ns)),
        }?;
        client.mark(call, flags)?;
        out_call.write(call.to_bits());
        Ok(())
    }

    fn pelton_client_notify(client: &mut Client, data[size]: Bytes, deadline_ns: Deadline) {
        let inner = client.unused()?;
        sent(match deadline_ns {
            Deadline::Now => inner.try_notify(data),
            Deadline::At(deadline) => inner.notify_until(data, deadline),
            Deadline::Never => inner.notify(data).map(|()| Sent::Sent),
        })
    }

    fn pelton_client_reserve(client: &mut Client, size: usize, deadline_ns: Deadline, out: Out<*mut c_void>) {
        client.reserved = None;
        check_size(size)?;
        let inner = client.unused()?;
        let mut space = match deadline_ns {
            Deadline::Now => found(inner.try_reserve(size)),
            Deadline::At(deadline) => found(inner.reserve_until(size, deadline)),
            Deadline::Never => done(inner.reserve(size)),
        }?;
        out.write(space.raw_parts().0.as_ptr().cast());
        client.reserved = Some((space.into_raw(), size));
        Ok(())
    }

    fn pelton_client_submit_reserved(client: &mut Client, size: usize, flags: u32, out_call: Out<u64>) {
        let flags = Flags::of(flags)?;
        let (_, reserved) = client.reserved.as_ref().ok_or_else(|| code::plain(code::NOT_RESERVED))?;
        check_used(size, *reserved)?;
        let (space, _) = client.reserved.take().ok_or_else(|| code::plain(code::NOT_RESERVED))?;
        // SAFETY: it is the client's last reservation, and nothing was submitted since.
        let space = unsafe { client.inner.request_reservation_from_raw(space) };
        let call = done(space.submit_bytes(size))?;
        client.mark(call, flags)?;
        out_call.write(call.to_bits());
        Ok(())
    }

    fn pelton_client_abort(client: &mut Client) {
        client.reserved.take().map(drop).ok_or_else(|| code::plain(code::NOT_RESERVED))
    }

    fn pelton_client_await(client: &mut Client, deadline_ns: Deadline, out: Out<CCompletion>) {
        out.write(take(client, |client| match deadline_ns {
            Deadline::Now => found(client.try_completion()),
            Deadline::At(deadline) => found(client.completion_until(deadline)),
            Deadline::Never => done(client.completion()),
        })?);
        Ok(())
    }

    fn pelton_client_await_call(client: &mut Client, call: u64, deadline_ns: Deadline, out: Out<CCompletion>) {
        let call = CallId::from_bits(call);
        out.write(take(client, |client| match deadline_ns {
            Deadline::Now => found(client.try_completion_of(call)),
            Deadline::At(deadline) => found(client.completion_of_until(call, deadline)),
            Deadline::Never => done(client.completion_of(call)),
        })?);
        Ok(())
    }

    fn pelton_client_release(client: &mut Client) {
        let taken = client.taken.take().ok_or_else(|| code::plain(code::NOT_RECEIVED))?;
        // SAFETY: it is the completion that was taken last.
        drop(unsafe { client.inner.completion_from_raw(taken) });
        Ok(())
    }

    fn pelton_client_cancel(client: &mut Client, call: u64) {
        is_done(client.unused()?.cancel(CallId::from_bits(call)))
    }

    fn pelton_client_fd(client: &mut Client) {
        Ok(client.inner.as_raw_fd())
    }

    fn pelton_client_poll(client: &mut Client) {
        is_done(client.unused()?.busy_poll())
    }

    fn pelton_client_arm(client: &mut Client) {
        armed(client.unused()?.arm())
    }

    fn pelton_client_disarm(client: &mut Client) {
        client.inner.disarm();
        Ok(())
    }

    fn pelton_client_get_info(client: &mut Client, out: Info<ClientInfo>) {
        let client = &client.inner;
        let peer = client.peer();
        out.write(ClientInfo {
            struct_bytes: 0,
            has_peer: peer.is_some().into(),
            peer_pid: peer.map_or(0, |peer| peer.pid),
            peer_uid: peer.map_or(0, |peer| peer.uid),
            request_bytes_max: client.request_bytes_max(),
            services: client.service_count() as u64,
            in_flight: client.in_flight() as u64,
            dropped: client.completions_dropped(),
            wakes_sent: client.wakes_sent(),
        })
    }
}
