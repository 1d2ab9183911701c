//! `RecordFile` and `RecordReader` of the addon. What waits for the file runs as a step on a thread, which has the file
//! or the reader meanwhile: `lib/records.js` begins one at a time.

use crate::error::{named, raise};
use crate::fast;
use crate::watch::Step;
use napi::bindgen_prelude::*;
use napi::sys;
use napi_derive::napi;
use pelton::{Appender, Appenders, Options, RecordFileOptions};
use std::cell::{RefCell, RefMut};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::rc::{Rc, Weak};
use std::time::Duration;

/// Something that JavaScript uses, unless a step of a thread has it, or it is closed.
struct Away<T> {
    value: Option<T>,
    step: Option<Step<(Option<T>, pelton::Result<()>)>>,
    noun: &'static str,
}

impl<T: Send + 'static> Away<T> {
    /// Begins by a step that returns it.
    fn opening(
        env: &Env,
        callback: &Function<'_, (), ()>,
        noun: &'static str,
        open: impl FnOnce() -> pelton::Result<T> + Send + 'static,
    ) -> Result<Rc<RefCell<Away<T>>>> {
        let step = Step::start(env, callback.raw(), true, &mut Some(open), |open, _| match open() {
            Ok(value) => (Some(value), Ok(())),
            Err(error) => (None, Err(error)),
        })?;
        Ok(Rc::new(RefCell::new(Away { value: None, step: Some(step), noun })))
    }

    fn get(&mut self) -> Result<&mut T> {
        let noun = self.noun;
        match (&mut self.value, &self.step) {
            (Some(value), _) => Ok(value),
            (None, Some(_)) => Err(named("wrong_thread", &format!("this {noun} is in use: await that"))),
            (None, None) => Err(named("closed_handle", &format!("this {noun} is closed: open it again"))),
        }
    }

    /// Begins `work`. `callback` is called once [`Away::finish`] has its result. What `work` returns comes back.
    fn start(
        &mut self,
        env: &Env,
        callback: &Function<'_, (), ()>,
        work: impl FnOnce(T) -> (Option<T>, pelton::Result<()>) + Send + 'static,
    ) -> Result<()> {
        self.get()?;
        self.step = Some(Step::start(env, callback.raw(), true, &mut self.value, |value, _| work(value))?);
        Ok(())
    }

    /// The end of a step.
    fn finish(&mut self) -> Result<()> {
        let Some((value, done)) = self.step.take().and_then(|step| step.take()) else { return Ok(()) };
        self.value = value;
        done.map_err(raise)
    }
}

fn in_use<T>(of: &RefCell<T>) -> Result<RefMut<'_, T>> {
    // Only an error that is being made runs JavaScript meanwhile.
    of.try_borrow_mut().map_err(|_| named("wrong_thread", "this object is in use: call it after that"))
}

/// An open record file, with one buffer: its messages have the order of their appends.
struct Open {
    appender: Appender,
    appenders: Appenders,
    cut_bytes: u64,
}

/// The options of a record file. Intervals are milliseconds; without one for flushes, only a full buffer is written.
#[napi(object)]
pub struct RecordOptions {
    pub rotate_bytes: Option<f64>,
    pub sync_bytes: Option<f64>,
    pub sync_interval: Option<f64>,
    pub flush_bytes: Option<f64>,
    pub flush_interval: Option<f64>,
}

thread_local! {
    /// The record files of this environment.
    static OPENED: RefCell<Vec<Weak<RefCell<Away<Open>>>>> = const { RefCell::new(Vec::new()) };
}

/// Writes the buffers of all record files that are open, after the steps that have begun: before the process ends,
/// which collects no objects then.
#[napi]
pub fn write_record_files() {
    for file in OPENED.take().iter().filter_map(Weak::upgrade) {
        let Ok(mut file) = file.try_borrow_mut() else { continue };
        if let Some((value, _)) = file.step.take().and_then(|step| step.wait()) {
            file.value = value;
        }
        if let Some(open) = &file.value {
            // The process ends: no caller can handle the error.
            let _ = open.appenders.flush();
        }
    }
}

/// Messages appended to a file.
#[napi]
pub struct RecordFile(Rc<RefCell<Away<Open>>>);

fn ms(interval: f64) -> Duration {
    // JavaScript has checked that it is not negative. More than a duration has is for ever.
    Duration::try_from_secs_f64(interval / 1e3).unwrap_or(Duration::MAX)
}

/// Begins to open a record file: a step.
#[napi]
pub fn open_record_file(
    env: Env,
    path: &[u8],
    given: RecordOptions,
    callback: Function<'_, (), ()>,
) -> Result<RecordFile> {
    let mut file = RecordFileOptions::new();
    if let Some(bytes) = given.rotate_bytes {
        file = file.rotate_bytes(bytes as u64);
    }
    if let Some(bytes) = given.sync_bytes {
        file = file.sync_bytes(bytes as u64);
    }
    if let Some(interval) = given.sync_interval {
        file = file.sync_interval(ms(interval));
    }
    let mut options = Options::new().flush_interval(given.flush_interval.map(ms));
    if let Some(bytes) = given.flush_bytes {
        options = options.flush_bytes(bytes as u64);
    }
    let path = OsStr::from_bytes(path).to_owned();
    let opened = Away::opening(&env, &callback, "record file", move || {
        let file = file.open(&path)?;
        let cut_bytes = file.cut_bytes();
        let appenders = Appenders::new(&options, file)?;
        Ok(Open { appender: appenders.appender()?, appenders, cut_bytes })
    })?;
    OPENED.with_borrow_mut(|files| {
        files.retain(|file| file.strong_count() > 0);
        files.push(Rc::downgrade(&opened));
    });
    Ok(RecordFile(opened))
}

/// `tryAppend(data)`: appends a message; false if the buffer has to be written before.
unsafe extern "C" fn try_append(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: Node calls, and `functions` has made the function.
    unsafe {
        fast::call::<Rc<RefCell<Away<Open>>>, bool, 1>(env, info, |file, arguments| {
            let data = arguments.bytes(0)?;
            let mut file = in_use(file)?;
            let appender = &mut file.get()?.appender;
            let sender = appender.sender();
            if sender.is_past_window(data.len()) && data.len() as u64 <= sender.message_bytes_max() {
                return Ok(false);
            }
            appender.append(data).map_err(raise)?;
            Ok(true)
        })
    }
}

#[napi]
impl RecordFile {
    /// The function that is called for each message.
    #[napi]
    pub fn functions<'env>(&self, env: &'env Env) -> Result<Vec<Unknown<'env>>> {
        // SAFETY: it is a `call` with this type.
        unsafe { Ok(vec![fast::function(env, c"tryAppend", &self.0, Some(try_append))?]) }
    }

    /// The end of a step.
    #[napi]
    pub fn finish(&self) -> Result<()> {
        in_use(&self.0)?.finish()
    }

    /// The bytes of a torn end that the opening has cut off.
    #[napi(getter)]
    pub fn cut_bytes(&self) -> Result<f64> {
        Ok(in_use(&self.0)?.get()?.cut_bytes as f64)
    }

    /// Begins to append a message, and to write the buffer before: a step.
    #[napi]
    pub fn start_append(&self, env: Env, data: &[u8], callback: Function<'_, (), ()>) -> Result<()> {
        let data = data.to_vec();
        in_use(&self.0)?.start(&env, &callback, move |mut open| {
            let done = open.appender.append(&data);
            (Some(open), done)
        })
    }

    /// Begins to write the buffer: a step.
    #[napi]
    pub fn start_flush(&self, env: Env, callback: Function<'_, (), ()>) -> Result<()> {
        in_use(&self.0)?.start(&env, &callback, |open| {
            let done = open.appenders.flush();
            (Some(open), done)
        })
    }

    /// Begins to write the buffer, and to wait for the disk: a step.
    #[napi]
    pub fn start_sync(&self, env: Env, callback: Function<'_, (), ()>) -> Result<()> {
        in_use(&self.0)?.start(&env, &callback, |open| {
            let done = open.appenders.sync();
            (Some(open), done)
        })
    }

    /// As `start_sync`, and closes the file, also if that fails.
    #[napi]
    pub fn start_close(&self, env: Env, callback: Function<'_, (), ()>) -> Result<()> {
        in_use(&self.0)?.start(&env, &callback, |open| {
            let done = open.appenders.sync();
            drop(open);
            (None, done)
        })
    }
}

/// A reader, and what its last step has read: the bytes of the messages, one after the other, and their sizes.
struct Reading {
    reader: pelton::RecordReader,
    bytes: Vec<u8>,
    sizes: Vec<u32>,
}

/// The messages of a record file.
#[napi]
pub struct RecordReader(Rc<RefCell<Away<Reading>>>);

/// Begins to open a record file, to read it: a step.
#[napi]
pub fn open_record_reader(env: Env, path: &[u8], callback: Function<'_, (), ()>) -> Result<RecordReader> {
    let path = OsStr::from_bytes(path).to_owned();
    let opened = Away::opening(&env, &callback, "record reader", move || {
        Ok(Reading { reader: pelton::RecordReader::open(&path)?, bytes: Vec::new(), sizes: Vec::new() })
    })?;
    Ok(RecordReader(opened))
}

#[napi]
impl RecordReader {
    /// The end of a step.
    #[napi]
    pub fn finish(&self) -> Result<()> {
        in_use(&self.0)?.finish()
    }

    /// Begins to read the next messages: a step.
    #[napi]
    pub fn start_read(&self, env: Env, callback: Function<'_, (), ()>) -> Result<()> {
        in_use(&self.0)?.start(&env, &callback, |mut reading| {
            let Reading { reader, bytes, sizes } = &mut reading;
            let done = reader.next_chunk().map(|chunk| {
                for payload in chunk.iter().flat_map(|chunk| chunk.payloads()) {
                    bytes.extend_from_slice(payload);
                    sizes.push(payload.len() as u32);
                }
            });
            (Some(reading), done)
        })
    }

    /// What the step has read: all messages in one buffer, and their sizes; none at the file's end.
    #[napi]
    pub fn take<'env>(&self, env: &'env Env) -> Result<(BufferSlice<'env>, Vec<u32>)> {
        let mut away = in_use(&self.0)?;
        let reading = away.get()?;
        let bytes = std::mem::take(&mut reading.bytes);
        Ok((BufferSlice::copy_from(env, bytes)?, std::mem::take(&mut reading.sizes)))
    }

    /// Closes it, once its step has ended.
    #[napi]
    pub fn close(&self) -> Result<()> {
        let mut away = in_use(&self.0)?;
        away.get()?;
        away.value = None;
        Ok(())
    }
}
