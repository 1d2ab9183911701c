//! Pipes, named so that the two processes find them, as the kernel makes them (64 KiB).

use std::path::Path;

use anyhow::{Context, Result};
use rustix::fs::{CWD, FileType, Mode, OFlags};

use super::{
    framed::{FramedReceiving, FramedSending},
    wire::Wire,
};
use crate::{endpoints::Transport, parameters::Job};

/// One pipe for each direction, one write per message.
pub struct Pipe;

impl Transport for Pipe {
    type Sending = FramedSending;
    type Receiving = FramedReceiving;

    fn sending(job: &Job, direction: &str) -> Result<FramedSending> {
        let fd = open(&job.directory.join(direction), OFlags::WRONLY)?;
        Ok(FramedSending::new(Wire::outgoing(fd, job.wait)?, false))
    }

    fn receiving(job: &Job, direction: &str) -> Result<FramedReceiving> {
        let fd = open(&job.directory.join(direction), OFlags::RDONLY)?;
        Ok(FramedReceiving::new(Wire::incoming(fd, job.wait)?, false, job.sizes.max as usize))
    }
}

/// Creates the pipe, unless the other side already has.
fn open(path: &Path, flags: OFlags) -> Result<std::os::fd::OwnedFd> {
    match rustix::fs::mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(error) => {
            return Err(error).with_context(|| format!("making the pipe {}", path.display()));
        }
    }
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())
        .with_context(|| format!("opening the pipe {}", path.display()))
}
