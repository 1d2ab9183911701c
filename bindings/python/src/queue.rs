//! `pelton._pelton.QueueFile`: the items of a `pelton.Queue` as objects of Python. `queue_file.rs` has the file, and
//! `python/pelton/queue.py` the classes that users see.
//!
//! An item is one message: the number of its buffers outside of the pickle, a u32, and the pickle. With buffers, these
//! come between: 4 bytes of zeros, the pickle's length, and the length of each buffer, doubled, plus 1 if it is
//! read-only, all u64; each buffer begins at a multiple of 64. Nothing runs code of Python while it holds a role.

use crate::bytes::to_bytes;
use crate::error::{self, raise};
use crate::handle::{deadline, in_slices};
use crate::number::option;
use crate::queue_claims::{self, Claims};
use crate::queue_file::{self, File, Offered, Outgoing};
use crate::view::fill_view;
use pelton::{Deadline, Error};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyList, PyType};
use std::alloc::{Layout, alloc, dealloc};
use std::os::fd::IntoRawFd;
use std::os::raw::c_int;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A larger item is copied without the GIL.
const WITH_GIL: usize = 64 << 10;

/// The alignment of a buffer outside of the pickle: that of a cache line, more than any type of NumPy needs.
const ALIGN: usize = 64;

/// How often a consumer searches for items that others had and were killed. A search lists a directory. A guess.
const ADOPTION: Duration = Duration::from_millis(30);

/// The bytes before a pickle without buffers.
const PREFIX: usize = 4;

/// What a pickler writes to: it keeps the pickle's parts.
#[pyclass(frozen, module = "pelton._pelton")]
pub struct Parts(Mutex<Vec<Py<PyBytes>>>);

#[pymethods]
impl Parts {
    fn write(&self, part: &Bound<'_, PyAny>) -> PyResult<usize> {
        let part = match part.cast_exact::<PyBytes>() {
            Ok(bytes) => bytes.clone(),
            // The pickler may change it after the call.
            Err(_) => part.py().get_type::<PyBytes>().call1((part,))?.cast_into()?,
        };
        let bytes = part.as_bytes().len();
        self.lock().push(part.unbind());
        Ok(bytes)
    }
}

impl Parts {
    fn lock(&self) -> MutexGuard<'_, Vec<Py<PyBytes>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A pickler that is used again, with what it writes to.
struct Packer {
    dump: Py<PyAny>,
    clear_memo: Py<PyAny>,
    parts: Py<Parts>,
    buffers: Py<PyList>,
}

impl Packer {
    fn new(py: Python<'_>) -> PyResult<Packer> {
        let (parts, buffers) = (Py::new(py, Parts(Mutex::default()))?, PyList::empty(py));
        let pickler = py
            .import(intern!(py, "pelton.queue"))?
            .call_method1(intern!(py, "pickler"), (&parts, buffers.getattr(intern!(py, "append"))?))?;
        Ok(Packer {
            dump: pickler.getattr(intern!(py, "dump"))?.unbind(),
            clear_memo: pickler.getattr(intern!(py, "clear_memo"))?.unbind(),
            parts,
            buffers: buffers.unbind(),
        })
    }
}

/// A pickled item.
struct Packed {
    pickle: Vec<Py<PyBytes>>,
    buffers: Vec<PyUntypedBuffer>,
}

impl Packed {
    /// The parts of the message. `heads` has space for what comes before the pickle.
    fn outgoing<'a>(&'a self, py: Python<'a>, head: &'a mut Vec<u8>) -> Outgoing<'a> {
        let pickle_bytes: usize = self.pickle.iter().map(|part| part.as_bytes(py).len()).sum();
        head.extend((self.buffers.len() as u32).to_ne_bytes());
        if !self.buffers.is_empty() {
            head.extend([0; 4]);
            head.extend((pickle_bytes as u64).to_ne_bytes());
            for buffer in &self.buffers {
                head.extend(((buffer.len_bytes() as u64) << 1 | u64::from(buffer.readonly())).to_ne_bytes());
            }
        }
        let mut bytes = head.len();
        let mut parts = Vec::with_capacity(1 + self.pickle.len() + self.buffers.len());
        parts.push((0, head.as_slice()));
        for part in &self.pickle {
            let part = part.as_bytes(py);
            parts.push((bytes, part));
            bytes += part.len();
        }
        for buffer in &self.buffers {
            bytes = bytes.next_multiple_of(ALIGN);
            if buffer.len_bytes() > 0 {
                // SAFETY: the exporter keeps so many bytes readable until the buffer is dropped, which outlives the
                // parts. Another thread of Python may write there meanwhile; any value of a byte is valid.
                let part = unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), buffer.len_bytes()) };
                parts.push((bytes, part));
                bytes += part.len();
            }
        }
        Outgoing { parts, bytes }
    }
}

/// A copy of an item's message, aligned as its buffers are.
struct Block {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory belongs to no thread. Only Python writes there, by the buffer protocol.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    fn copy_of(message: &[u8]) -> pelton::Result<Block> {
        let no_memory = || Error::System {
            what: format!("allocating {} bytes for an item, which stays in the queue", message.len()),
            error: std::io::ErrorKind::OutOfMemory.into(),
        };
        let layout = Layout::from_size_align(message.len().max(1), ALIGN).map_err(|_| no_memory())?;
        // SAFETY: the layout has at least one byte.
        let start = NonNull::new(unsafe { alloc(layout) }).ok_or_else(no_memory)?;
        // SAFETY: the allocation is new, and large enough.
        unsafe { pelton::raw::copy(message.as_ptr(), start.as_ptr(), message.len()) };
        Ok(Block { start, layout })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// A part of an item's message, as the memory of an object that is unpickled.
#[pyclass(frozen, module = "pelton._pelton")]
pub struct Part {
    block: Arc<Block>,
    at: usize,
    bytes: usize,
    is_read_only: bool,
}

#[pymethods]
impl Part {
    unsafe fn __getbuffer__(this: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let part = this.get();
        // SAFETY: the part lies in the block, as `parts` has checked.
        let start = unsafe { part.block.start.byte_add(part.at) };
        // SAFETY: Python wants this view filled. The view keeps this object, and so the block.
        unsafe { fill_view(view, this.as_any(), (start, part.bytes), part.is_read_only, flags) }
    }
}

/// The pickle and the buffers of a message.
fn parts(py: Python<'_>, message: Block) -> PyResult<(Py<Part>, Vec<Py<Part>>)> {
    let block = Arc::new(message);
    let bytes = block.layout.size();
    // SAFETY: the block has so many initialised bytes, which nobody has seen yet.
    let message = unsafe { std::slice::from_raw_parts(block.start.as_ptr(), bytes) };
    let word = |at: usize| message.get(at..at + 8).and_then(|word| word.try_into().ok()).map(u64::from_ne_bytes);
    let part = |at: usize, len: usize, is_read_only| Part { block: block.clone(), at, bytes: len, is_read_only };
    let read = || {
        let count = u32::from_ne_bytes(*message.first_chunk()?) as usize;
        if count == 0 {
            return Some((part(PREFIX, bytes.checked_sub(PREFIX)?, true), Vec::new()));
        }
        let mut at = count.checked_mul(8)?.checked_add(16)?;
        let pickle_bytes = usize::try_from(word(8)?).ok()?;
        let pickle = part(at, pickle_bytes, true);
        at = at.checked_add(pickle_bytes)?;
        let mut buffers = Vec::new();
        for index in 0..count {
            let word = word(16 + 8 * index)?;
            let len = usize::try_from(word >> 1).ok()?;
            at = at.checked_next_multiple_of(ALIGN)?;
            // An empty one at the end has no place in the message.
            buffers.push(part(if len == 0 { 0 } else { at }, len, word & 1 == 1));
            at = at.checked_add(len)?;
            if len > 0 && at > bytes {
                return None;
            }
        }
        (pickle.at + pickle.bytes <= bytes).then_some((pickle, buffers))
    };
    let Some((pickle, buffers)) = read() else {
        return Err(raise(py, Error::Corrupt("an item of the queue has lengths that it does not contain".to_owned())));
    };
    Ok((Py::new(py, pickle)?, buffers.into_iter().map(|buffer| Py::new(py, buffer)).collect::<PyResult<_>>()?))
}

/// A message that was taken out of the queue.
enum Taken {
    /// The pickle of a small item without buffers.
    Small(Py<PyBytes>),
    Block(Block),
}

/// A queue that this process has open: see `pelton.Queue`.
#[pyclass(frozen, module = "pelton._pelton")]
pub struct QueueFile {
    file: File,
    packer: Mutex<Option<Packer>>,
    /// Of a `JoinableQueue`. Locked without the GIL.
    claims: Mutex<Claims>,
    /// When this process next searches for claims of processes that were killed.
    adopts_at: Mutex<Instant>,
}

impl QueueFile {
    fn new(py: Python<'_>, file: pelton::Result<File>) -> PyResult<QueueFile> {
        let file = file.map_err(|error| raise(py, error))?;
        let claims = Mutex::new(Claims::new(file.path().to_owned()));
        Ok(QueueFile { file, packer: Mutex::new(None), claims, adopts_at: Mutex::new(Instant::now()) })
    }

    fn check_open(&self, py: Python<'_>) -> PyResult<()> {
        if self.file.has_left() {
            return Err(error::named(py, "ClosedHandle", "this queue is closed: use one that is open"));
        }
        // A child opens its queues anew, unless that fails.
        if self.file.is_forked() { Err(raise(py, Error::Forked)) } else { Ok(()) }
    }

    /// Pickles an object.
    fn pack(&self, object: &Bound<'_, PyAny>) -> PyResult<Packed> {
        let py = object.py();
        // Not locked while it pickles: that may run code which puts into this queue.
        let stored = self.packer.lock().ok().and_then(|mut stored| stored.take());
        let packer = match stored {
            Some(packer) => packer,
            None => Packer::new(py)?,
        };
        // After an error the pickler is dropped, with whatever it has written.
        packer.dump.call1(py, (object,))?;
        packer.clear_memo.call0(py)?;
        let pickle = std::mem::take(&mut *packer.parts.get().lock());
        let list = packer.buffers.bind(py);
        let mut buffers = Vec::with_capacity(list.len());
        if !list.is_empty() {
            for buffer in list.iter() {
                buffers.push(PyUntypedBuffer::get(&buffer.call_method0(intern!(py, "raw"))?)?);
            }
            list.call_method0(intern!(py, "clear"))?;
        }
        if let Ok(mut stored) = self.packer.lock() {
            *stored = Some(packer);
        }
        Ok(Packed { pickle, buffers })
    }

    /// Repeats `attempt`, until a deadline that is at most one slice away, until it returns something. `None` once
    /// `deadline` has passed. Waits without the GIL.
    fn wait<R: Send>(
        &self,
        py: Python<'_>,
        deadline: Deadline,
        attempt: impl Fn(Instant) -> pelton::Result<Option<R>> + Send + Sync,
    ) -> PyResult<Option<R>> {
        in_slices(py, deadline, |until| {
            self.check_open(py)?;
            py.detach(|| attempt(until)).map_err(|error| raise(py, error))
        })
    }

    /// Takes the next item. `None` once the deadline has passed.
    fn take(&self, py: Python<'_>, deadline: Deadline) -> PyResult<Option<(Taken, bool)>> {
        self.check_open(py)?;
        let failed = |error| raise(py, error);
        if let Some(role) = self.file.try_lock_to_get().map_err(failed)? {
            let taken = self.file.try_get(&role, |Offered { message, .. }| {
                let is_small = message.len() <= WITH_GIL && message.get(..PREFIX) == Some(&[0; PREFIX]);
                // Without memory for it the item is left, and the way of larger ones reports that.
                Ok(if is_small { to_bytes(py, &message[PREFIX..]).ok().map(Bound::unbind) } else { None })
            });
            drop(role);
            if let Some((pickle, is_redelivered)) = taken.map_err(failed)? {
                self.file.after_get();
                return Ok(Some((Taken::Small(pickle), is_redelivered)));
            }
        }
        let copy = |item: Offered<'_>| Block::copy_of(item.message).map(Some);
        let taken = match deadline {
            Deadline::Now => py.detach(|| self.file.get_now(copy)).map_err(failed)?,
            _ => self.wait(py, deadline, |until| self.file.get_until(until, copy))?,
        };
        Ok(taken.map(|(block, is_redelivered)| (Taken::Block(block), is_redelivered)))
    }

    fn leave(&self) {
        // In a forked child, the thread that had the lock of the claims does not exist.
        if !self.file.has_left() && !self.file.is_forked() {
            self.claims().end();
            self.file.after_done();
        }
        self.file.leave();
    }

    fn claims(&self) -> MutexGuard<'_, Claims> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As `take`, and claims the item until `task_done`; returns also the claim's number. Gives those again that others
    /// had claimed and were killed.
    fn claim(&self, py: Python<'_>, deadline: Deadline) -> PyResult<Option<((Block, u64), bool)>> {
        self.check_open(py)?;
        let claim = |Offered { message, seq, is_redelivered }: Offered<'_>| {
            if is_redelivered {
                queue_claims::void(self.file.path(), seq)?;
            }
            // In this order: without memory for it, the item stays.
            let block = Block::copy_of(message)?;
            Ok(self.claims().claim(seq, message)?.map(|number| (block, number)))
        };
        let attempt = |until: Instant| {
            if self.must_adopt() {
                let adopt = |interrupted| self.claims().adopt(interrupted, Block::copy_of);
                if let Some(adopted) = self.file.adopt(until, adopt)? {
                    // There may be more.
                    self.adopts_next_at(Instant::now());
                    return Ok(Some((adopted, true)));
                }
            }
            match deadline {
                Deadline::Now => self.file.get_now(claim),
                _ => self.file.get_until(until, claim),
            }
        };
        match deadline {
            Deadline::Now => py.detach(|| attempt(Instant::now())).map_err(|error| raise(py, error)),
            _ => self.wait(py, deadline, attempt),
        }
    }

    fn adopts_next_at(&self, next: Instant) {
        *self.adopts_at.lock().unwrap_or_else(PoisonError::into_inner) = next;
    }

    /// Whether it is time to search for claims.
    fn must_adopt(&self) -> bool {
        let (mut at, now) = (self.adopts_at.lock().unwrap_or_else(PoisonError::into_inner), Instant::now());
        let is_due = *at <= now;
        if is_due {
            *at = now + ADOPTION;
        }
        is_due
    }

    fn get_object<'py>(
        &self,
        py: Python<'py>,
        block: bool,
        timeout: Option<f64>,
        claims: bool,
    ) -> PyResult<(Bound<'py, PyAny>, bool)> {
        let deadline = if block { deadline(timeout)? } else { Deadline::Now };
        let (taken, claim, is_redelivered) = match claims {
            true => match self.claim(py, deadline)? {
                Some(((block, number), is_redelivered)) => (Taken::Block(block), Some(number), is_redelivered),
                None => return Err(empty(py)?),
            },
            false => match self.take(py, deadline)? {
                Some((taken, is_redelivered)) => (taken, None, is_redelivered),
                None => return Err(empty(py)?),
            },
        };
        let object = unpickled(py, taken).inspect_err(|_| {
            // Nobody can call `task_done` for it.
            if let Some(number) = claim {
                let _ = py.detach(|| self.claims().done(number));
                self.file.after_done();
            }
        })?;
        Ok((object, is_redelivered))
    }
}

fn empty(py: Python<'_>) -> PyResult<PyErr> {
    static EMPTY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    Ok(PyErr::from_type(EMPTY.import(py, "queue", "Empty")?.clone(), ()))
}

fn unpickled<'py>(py: Python<'py>, taken: Taken) -> PyResult<Bound<'py, PyAny>> {
    static LOADS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let loads = LOADS.import(py, "pickle", "loads")?;
    match taken {
        Taken::Small(pickle) => loads.call1((pickle,)),
        Taken::Block(block) => {
            let (pickle, buffers) = parts(py, block)?;
            let given = PyDict::new(py);
            given.set_item(intern!(py, "buffers"), buffers)?;
            loads.call((pickle,), Some(&given))
        }
    }
}

impl Drop for QueueFile {
    fn drop(&mut self) {
        self.leave();
    }
}

/// The truth of any object, as Python takes it for `block`.
fn truth(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    object.is_truthy()
}

#[pymethods]
impl QueueFile {
    /// Creates a queue of at most `items_max` items (0: any number) in at most `capacity` bytes.
    #[staticmethod]
    fn create(items_max: &Bound<'_, PyAny>, capacity: &Bound<'_, PyAny>) -> PyResult<QueueFile> {
        let (py, items_max) = (capacity.py(), option("maxsize", items_max)?);
        QueueFile::new(py, File::create(items_max, option("capacity", capacity)?))
    }

    /// Opens a queue by its name.
    #[staticmethod]
    fn open(py: Python<'_>, name: &str) -> PyResult<QueueFile> {
        QueueFile::new(py, File::open(name))
    }

    /// Removes the files of queues that no process has open any more. Does not wait.
    #[staticmethod]
    fn sweep() {
        queue_file::sweep();
    }

    /// Opens the queue anew, in a forked child.
    fn reopen(&self, py: Python<'_>) -> PyResult<QueueFile> {
        QueueFile::new(py, self.file.reopen())
    }

    /// Keeps the file for a child that is about to be forked: a descriptor, to be closed after that.
    fn keep_for_child(&self, py: Python<'_>) -> PyResult<i32> {
        self.file.keep_for_child().map(IntoRawFd::into_raw_fd).map_err(|error| raise(py, error))
    }

    #[getter]
    fn name(&self) -> String {
        self.file.name()
    }

    #[getter]
    fn capacity(&self) -> u64 {
        self.file.capacity()
    }

    #[getter]
    fn items_max(&self) -> u64 {
        self.file.items_max()
    }

    #[getter]
    fn closed(&self) -> bool {
        self.file.has_left()
    }

    /// The number of items. Does not wait.
    fn qsize(&self, py: Python<'_>) -> PyResult<u64> {
        self.check_open(py)?;
        Ok(self.file.items())
    }

    /// Puts an item. Raises `queue.Full`.
    #[pyo3(signature = (object, block=true, timeout=None))]
    fn put(
        &self,
        object: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = truth)] block: bool,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let py = object.py();
        self.check_open(py)?;
        let deadline = if block { deadline(timeout)? } else { Deadline::Now };
        let (packed, mut head) = (self.pack(object)?, Vec::new());
        let item = packed.outgoing(py, &mut head);
        let failed = |error| raise(py, error);
        if item.bytes <= WITH_GIL
            && let Some(role) = self.file.try_lock_to_put().map_err(failed)?
        {
            let put = self.file.try_put(&role, &item);
            drop(role);
            if put.map_err(failed)? {
                self.file.after_put();
                return Ok(());
            }
        }
        let put = match deadline {
            Deadline::Now => py.detach(|| self.file.put_now(&item)).map_err(failed)?,
            _ => {
                let put = |until| Ok(self.file.put_until(&item, until)?.then_some(()));
                self.wait(py, deadline, put)?.is_some()
            }
        };
        if put {
            return Ok(());
        }
        static FULL: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        Err(PyErr::from_type(FULL.import(py, "queue", "Full")?.clone(), ()))
    }

    /// Takes the next item. Raises `queue.Empty`.
    #[pyo3(signature = (block=true, timeout=None))]
    fn get<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = truth)] block: bool,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.get_object(py, block, timeout, false)?.0)
    }

    /// As `get`, and keeps a copy of the item until `task_done`. Returns also whether a process that was killed had it.
    #[pyo3(signature = (block=true, timeout=None))]
    fn claim_object<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = truth)] block: bool,
        timeout: Option<f64>,
    ) -> PyResult<(Bound<'py, PyAny>, bool)> {
        self.get_object(py, block, timeout, true)
    }

    /// Ends the claim of an item. Returns false if this process has none.
    fn task_done(&self, py: Python<'_>) -> PyResult<bool> {
        self.check_open(py)?;
        let done = py.detach(|| self.claims().task_done()).map_err(|error| raise(py, error))?;
        self.file.after_done();
        Ok(done)
    }

    /// Waits until every item is done.
    fn join(&self, py: Python<'_>) -> PyResult<()> {
        let joined = |until| Ok(self.file.join_until(until)?.then_some(()));
        self.wait(py, Deadline::Never, joined).map(drop)
    }

    /// Ends the use of the queue by this process. The last process that does so removes the file. Does not wait.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.leave());
    }
}
