//! What pelton asks of the operating system: memory, descriptors, sockets, barriers, and what a fork leaves. All of the
//! crate's `unsafe` lives here, but for the hand-over of memory to the lane in `sender.rs` and `receiver.rs`.

mod bell;
mod descriptor;
mod fork;
pub(crate) mod membarrier;
mod segment;
pub(crate) mod socket;

pub(crate) use bell::{Bell, Pollable, Ready, poll_until};
pub(crate) use descriptor::Descriptor;
pub(crate) use fork::Owner;
pub(crate) use segment::{Kind, Segment};

/// Asks the processor to let the other side go first, in a loop that spins.
#[inline(always)]
pub(crate) fn relax() {
    std::hint::spin_loop();
}

/// Processors that this thread may run on; spinning on a single one only keeps the other side from running.
pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// The lane's view of four segments.
pub(crate) fn lane_memory(
    page: &Segment,
    consumer: &Segment,
    receiver: &Segment,
    data: &Segment,
) -> pelton_lane::Memory {
    pelton_lane::Memory {
        producer: page.base().cast(),
        consumer: consumer.base().cast(),
        receiver: receiver.base().cast(),
        // SAFETY: the segment's mapping is as long as its size, page-aligned, and kept by whoever keeps the lane.
        data: unsafe { pelton_lane::Data::new(data.base(), data.bytes()) },
    }
}
