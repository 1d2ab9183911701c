//! Memory: only an operation uses its memory until it has ended, even if the engine is dropped, the operation refused
//! or abandoned.

use super::*;

/// The thread that waits until the kernel has finished the operations of a dropped engine.
const END: &str = "pelton-file-end";

/// Waits until no thread of this process keeps the remains of a dropped engine.
fn wait_for_kernel() {
    eventually("the kernel ends what a dropped engine had begun", || kernel::threads_named(END).is_empty());
}

#[test]
fn an_engine_dropped_at_any_stage_frees_no_memory_the_kernel_may_write() {
    everywhere("an engine dropped at any stage", |case| {
        const BYTES: usize = 256 << 10;
        let path = case.path("a");
        std::fs::write(&path, vec![0xff; 16 * BYTES]).unwrap();
        for stage in 0..24 {
            let mut engine = case.engine();
            let how = Open::for_reading();
            let direct = ran(&mut engine, Operation::open(&path, how.direct()));
            let file = direct.or_else(|_| ran(&mut engine, Operation::open(&path, how))).unwrap().into_file().unwrap();
            let (read, mut write) = pipe("a pipe");
            submit(&mut engine, 100, Operation::read(&read, vec![0; BYTES]));
            for token in 0..16 {
                submit(&mut engine, token, Operation::read_at(&file, Buffer::aligned(BYTES), token * BYTES as u64));
            }
            let chain = (0..3).map(|token| (200 + token, Operation::read(&read, vec![0; BYTES])));
            assert!(engine.try_submit_chain(chain).unwrap().is_submitted());
            // Nothing started; started; that many taken; cancelled.
            if stage > 0 {
                engine.start().unwrap();
            }
            let mut kept = Vec::new();
            for _ in 2..stage.min(16) {
                kept.push(done(&mut engine));
            }
            if stage >= 16 {
                assert!(engine.cancel(100).unwrap());
            }
            if stage >= 20 {
                assert!(engine.cancel(201).unwrap());
                engine.start().unwrap();
            }
            drop(engine);
            // A new allocation of memory that the kernel still writes would change.
            let mine: Vec<(Vec<u8>, Buffer)> = (0..20).map(|_| (vec![0x11; BYTES], Buffer::aligned(BYTES))).collect();
            let _ = write.write_all(&[0xee; 5000]);
            wait_for_kernel();
            for (vector, aligned) in &mine {
                assert!(vector.iter().all(|byte| *byte == 0x11), "stage {stage}");
                assert!(aligned.iter().all(|byte| *byte == 0), "stage {stage}");
            }
            assert!(
                kept.iter().filter(|read| read.token < 16).all(|read| read.bytes().iter().all(|byte| *byte == 0xff))
            );
        }
    });
}

/// Memory that Rust does not own, and the number of releases of each.
pub(super) struct ForeignBuffers {
    memory: Vec<std::cell::UnsafeCell<[u8; 4096]>>,
    released: std::sync::Arc<Vec<std::sync::atomic::AtomicUsize>>,
}

impl ForeignBuffers {
    pub(super) fn new(count: usize) -> ForeignBuffers {
        let memory = (0..count).map(|_| std::cell::UnsafeCell::new([0; 4096])).collect();
        ForeignBuffers { memory, released: std::sync::Arc::new((0..count).map(|_| Default::default()).collect()) }
    }

    pub(super) fn buffer(&self, number: usize) -> Buffer {
        unsafe extern "C" fn release(context: *mut std::ffi::c_void) {
            // SAFETY: the pointer comes from a box below, and is passed once.
            let (released, number) = *unsafe {
                Box::from_raw(context.cast::<(std::sync::Arc<Vec<std::sync::atomic::AtomicUsize>>, usize)>())
            };
            released[number].fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
        let context = Box::into_raw(Box::new((self.released.clone(), number)));
        // SAFETY: the test reads the memory after its release, when nothing else does, and the memory outlives that.
        unsafe { Buffer::foreign(self.memory[number].get().cast(), 4096, Some(release), context.cast()) }
    }

    /// The content, only if nothing else uses the memory.
    pub(super) fn bytes(&self, number: usize) -> &[u8] {
        // SAFETY: the caller guarantees that nothing else uses the memory.
        unsafe { &*self.memory[number].get() }
    }

    pub(super) fn times(&self) -> Vec<usize> {
        self.released.iter().map(|times| times.load(std::sync::atomic::Ordering::Relaxed)).collect()
    }
}

#[test]
fn foreign_memory_is_released_once_whatever_its_operation_does() {
    everywhere("foreign memory is released once", |case| {
        let foreign_memory = ForeignBuffers::new(10);
        let path = case.path("a");
        std::fs::write(&path, [7; 4096]).unwrap();
        let mut engine = case.options.clone().in_flight_max(8).build().unwrap();
        let file = open(&mut engine, &path);
        let (idle, mut writer) = pipe("idle");
        // Done, and the memory is valid as long as the completion.
        let done_ = ran(&mut engine, Operation::read_at(&file, foreign_memory.buffer(0), 0)).unwrap();
        assert_eq!((done_.bytes().as_ptr(), foreign_memory.times()[0]), (foreign_memory.bytes(0).as_ptr(), 0));
        drop(done_);
        assert_eq!((foreign_memory.times()[0], foreign_memory.bytes(0)), (1, &[7; 4096][..]));
        // Failed, with the memory returned by the operation or not.
        let refused = Operation::write_at(&open_to_read(&mut engine, &path), foreign_memory.buffer(1), 0);
        assert_eq!(errno(&ran(&mut engine, refused).unwrap_err()), "EBADF");
        assert_eq!(foreign_memory.times()[1], 1);
        // Converted to a vector.
        assert_eq!(
            ran(&mut engine, Operation::read_at(&file, foreign_memory.buffer(2), 0)).unwrap().buffer.into_vec(),
            [7; 4096]
        );
        assert_eq!(foreign_memory.times()[2], 1);
        // Several pieces: cancelled before and after they have begun, undone in a chain, not taken, abandoned, and
        // left in flight.
        for (token, number) in [(1, 3), (2, 4), (3, 5)] {
            submit(&mut engine, token, Operation::read(&idle, foreign_memory.buffer(number)));
        }
        assert!(engine.cancel(1).unwrap());
        assert_eq!(failure(&done(&mut engine)), "ECANCELED");
        assert_eq!(foreign_memory.times()[3], 1);
        engine.start().unwrap();
        assert!(engine.cancel(2).unwrap());
        assert_eq!(failure(&done(&mut engine)), "ECANCELED");
        assert_eq!(foreign_memory.times()[4], 1);
        let chain = [
            (4, Operation::unlink(case.path("missing"))),
            (5, Operation::write_at(&file, foreign_memory.buffer(6), 0)),
        ];
        assert!(engine.try_submit_chain(chain).unwrap().is_submitted());
        (0..2).for_each(|_| drop(done(&mut engine)));
        assert_eq!(foreign_memory.times()[6], 1);
        let soon = Instant::now() + Duration::from_millis(5);
        assert!(engine.run_until(Operation::read(&idle, foreign_memory.buffer(7)), soon).unwrap().is_none());
        let pieces = vec![foreign_memory.buffer(8), foreign_memory.buffer(9)];
        submit(&mut engine, 6, Operation::read_vectored_at(&file, pieces, 0));
        engine.start().unwrap();
        drop(engine);
        let deadline = deadline();
        while foreign_memory.times() != [1; 10] {
            assert!(Instant::now() < deadline, "released {:?}, wanted each once", foreign_memory.times());
            std::thread::yield_now();
        }
        // Nothing is read into released memory.
        let _ = writer.write_all(&[9; 5000]);
        wait_for_kernel();
        assert!([5, 7].iter().all(|number| foreign_memory.bytes(*number).iter().all(|byte| *byte == 0)));
    });
}

#[test]
fn memory_of_the_kernel_is_released_after_completion_even_without_io_uring() {
    let _hang = Watchdog::new("memory of the kernel is released after completion");
    if !Engine::new().unwrap().uses_io_uring() {
        eprintln!("no io_uring here: it cannot be refused later");
        return;
    }
    std::thread::spawn(|| {
        let foreign_memory = ForeignBuffers::new(2);
        let mut engine = Engine::new().unwrap();
        let (idle, mut writer) = pipe("idle");
        submit(&mut engine, 1, Operation::read(&idle, foreign_memory.buffer(0)));
        engine.start().unwrap();
        submit(&mut engine, 2, Operation::read(&idle, foreign_memory.buffer(1)));
        seccomp::refuse(libc::SYS_io_uring_enter, libc::EPERM);
        drop(engine);
        // The kernel may write to the piece that it has.
        assert_eq!(foreign_memory.times(), [0, 1]);
        // Nor does the thread that waits for its end forget it. (Any other such thread waits in io_uring_enter.)
        eventually("a thread waits for its end in poll", || {
            kernel::threads_named(END).into_iter().any(kernel::thread_polls)
        });
        assert_eq!(foreign_memory.times(), [0, 1]);
        writer.write_all(b"bytes").unwrap();
        let deadline = deadline();
        while foreign_memory.times() != [1, 1] {
            assert!(Instant::now() < deadline, "it is never released");
            std::thread::yield_now();
        }
        assert_eq!(&foreign_memory.bytes(0)[..5], b"bytes");
    })
    .join()
    .unwrap();
}
