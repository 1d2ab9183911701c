//! The memory of a sender's lane: it applies a change of the window and releases memory. `crate::window` decides
//! the window's size.

use super::{STEP, Sender};
use crate::error::{Error, Result};
use crate::window::Keeps;
use pelton_os as os;

impl Sender {
    /// Adapts the window to the throughput. The slow path, which runs at least once per 256 KiB sent, calls it before
    /// it reserves space: this function may release memory behind the tail.
    #[inline(always)]
    pub(super) fn find_window(&mut self) {
        let sent = self.parts.lane.sent_bytes();
        if self.window.is_due(sent) {
            self.sample_window(sent);
        }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn sample_window(&mut self, sent: u64) {
        let lane = &mut self.parts.lane;
        // A receiver that lacks only the last batch keeps up, however large that is.
        let kept_up = lane.window().max(self.window.bytes_since_sample(sent));
        // An invalid head is reported by the reservation that follows.
        let receiver = match lane.refresh_head() {
            Ok(1..) if lane.backlog_bytes() > kept_up => Keeps::Behind,
            Ok(1..) => Keeps::Up,
            _ => Keeps::Waiting,
        };
        let bytes = self.window.sample(sent, receiver, os::monotonic_ns());
        let current = self.parts.lane.window();
        let backed = self.parts.lane.backed();
        // A path channel allocates the whole window now. So a full file system ends the trial, and no send fails.
        if bytes > current && bytes > backed && self.parts.back(bytes).is_err() {
            // The failed allocation may have allocated a part. A disk's file system keeps it, so this releases it.
            let (from, to) = (backed.next_multiple_of(os::PIECE), bytes.next_multiple_of(STEP));
            let _ = self.parts.memory.data.punch(from, to.min(self.parts.lane.capacity()).saturating_sub(from));
            self.window.refuse(current);
        } else if bytes != current {
            self.parts.lane.set_window(bytes);
        }
        if receiver != Keeps::Behind && self.window.take_excess() {
            // After a failure the memory only stays allocated.
            let _ = self.release_outside_window();
        }
    }

    /// Releases memory that holds no message: after a burst the lane keeps its memory until this call. One system call
    /// for each of at most two ranges; the lane stays in use meanwhile. A path channel has to allocate released memory
    /// again before its next use, which a full file system may refuse.
    ///
    /// # Errors
    /// [`Error::System`], [`Error::Forked`].
    pub fn trim(&mut self) -> Result<()> {
        if self.endpoint.owner.is_forked() {
            return Err(Error::Forked);
        }
        self.unreleased();
        self.parts.lane.set_window(self.window.shrink());
        self.release_behind(0)
    }

    /// Releases memory outside the window that holds no message.
    fn release_outside_window(&mut self) -> Result<()> {
        let kept = self.parts.lane.window().next_multiple_of(os::PIECE);
        // A path channel's first step stays allocated, so that few sends can fail.
        self.release_behind(if self.endpoint.is_path() { kept.max(STEP) } else { kept })
    }

    fn release_behind(&mut self, kept: u64) -> Result<()> {
        for (offset, bytes) in self.parts.lane.idle() {
            let end = offset + bytes;
            let offset = offset.max(kept);
            if offset >= end {
                continue;
            }
            if self.endpoint.is_path() {
                let backed = self.parts.lane.backed().min(offset);
                self.parts.lane.set_backed(backed);
            }
            self.parts.memory.data.punch(offset, end - offset).map_err(Error::system("releasing memory"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;
    use crate::wait::Wait;
    use pelton_lane::{CAPACITY_MIN, WINDOW};

    /// Sends this many bytes; the lane is never empty meanwhile.
    fn pass(sender: &mut Sender, receiver: &mut crate::Receiver, bytes: usize) {
        let message = [7; 60_000];
        for _ in 0..bytes / message.len() {
            sender.send(&message).unwrap();
            if sender.unreleased() > 1 {
                assert_eq!(*receiver.receive().unwrap(), message);
            }
        }
    }

    fn used(sender: &Sender) -> u64 {
        sender.parts.memory.data.allocated_bytes().unwrap()
    }

    #[test]
    fn a_shrunk_window_releases_its_memory_later_and_trim_immediately() {
        let root = tempfile::tempdir().unwrap();
        let options = Options::new().capacity(32 << 20).wait(Wait::Spin);
        let by_path = || {
            let sender = options.create_sender(root.path().join("c")).unwrap();
            (sender, options.cast().open_receiver(root.path().join("c")).unwrap())
        };
        for (mut sender, mut receiver) in [options.cast().threads().unwrap(), by_path()] {
            for trims in [false, true] {
                sender.window.fix(12 << 20);
                pass(&mut sender, &mut receiver, 40 << 20);
                assert_eq!(sender.parts.lane.window(), 12 << 20);
                assert!(used(&sender) >= 11 << 20, "{}", used(&sender));
                sender.window.fix(WINDOW);
                if trims {
                    sender.trim().unwrap();
                    assert!(used(&sender) <= 1 << 20, "{}", used(&sender));
                } else {
                    sender.window.shrink();
                }
                pass(&mut sender, &mut receiver, 40 << 20);
                assert_eq!(sender.parts.lane.window(), WINDOW);
                assert!(used(&sender) <= 2 << 20, "{}", used(&sender));
            }
        }
    }

    #[test]
    fn a_receiver_that_lacks_only_a_message_larger_than_the_window_keeps_up() {
        let (mut sender, mut receiver) = Options::new().threads().unwrap();
        let message = vec![0; WINDOW as usize + 1000];
        sender.send(&message).unwrap();
        // Samples of a busy machine may be too slow for a trial.
        let found = (0..100_000).any(|_| {
            sender.send(&message).unwrap();
            assert!(receiver.try_receive().unwrap().is_some());
            sender.parts.lane.window() > WINDOW
        });
        assert!(found);
    }

    #[test]
    fn resident_max_bounds_the_window_also_below_its_usual_size() {
        for most in [1 << 20, 100_000, 0] {
            let (mut sender, mut receiver) = Options::new().resident_max(most).threads().unwrap();
            let most = most.max(CAPACITY_MIN);
            assert_eq!(sender.parts.lane.window(), most.min(WINDOW));
            pass(&mut sender, &mut receiver, 200 << 20);
            assert!(sender.parts.lane.window() <= most);
            // A few messages may lie beyond the window.
            assert!(used(&sender) <= (most + 250_000).next_multiple_of(4096), "{} of {most}", used(&sender));
        }
    }

    #[test]
    fn a_full_file_system_ends_a_trial_and_no_send() {
        let root = tempfile::tempdir().unwrap();
        let Some(mounted) = pelton_testkit::Mounted::tmpfs(&root.path().join("mounted"), "size=1500k") else { return };
        let options = Options::new().wait(Wait::Spin);
        let mut sender = options.create_sender(mounted.0.join("c")).unwrap();
        let mut receiver = options.cast().open_receiver(mounted.0.join("c")).unwrap();
        pass(&mut sender, &mut receiver, 1 << 20);
        sender.window.fix(4 << 20);
        pass(&mut sender, &mut receiver, 20 << 20);
        assert_eq!(sender.parts.lane.window(), WINDOW);
        assert!(used(&sender) <= 1 << 20, "{}", used(&sender));
    }
}
