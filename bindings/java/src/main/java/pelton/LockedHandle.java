package pelton;

import java.lang.ref.Reference;
import java.util.concurrent.locks.ReentrantLock;

/** A handle that any number of threads share: a lock orders the uses of the C handle. */
abstract sealed class LockedHandle extends Handle permits Client, RecordFile {
    final ReentrantLock lock = new ReentrantLock();

    LockedHandle(long address) {
        super(address);
    }

    /** What is garbage is closed: not before the call with its handle has returned. */
    final void unlock() {
        lock.unlock();
        Reference.reachabilityFence(this);
    }
}
