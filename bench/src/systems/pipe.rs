//! Pipes, named so that the two processes find them, as the kernel makes them (64 KiB).

use std::path::Path;

use anyhow::{Context, Result};
use rustix::fs::{CWD, FileType, Mode, OFlags};

use super::{
    framed::{FramedReceiving, FramedSending},
    wire::Wire,
};
use crate::{
    endpoints::Transport,
    parameters::{Job, Role},
};

/// One pipe for each direction, one write per message.
pub struct Pipe;

impl Transport for Pipe {
    type Sending = FramedSending;
    type Receiving = FramedReceiving;

    fn sending(job: &Job) -> Result<FramedSending> {
        writer(job, "there")
    }

    fn receiving(job: &Job) -> Result<FramedReceiving> {
        reader(job, "there")
    }

    fn both(job: &Job) -> Result<(FramedSending, FramedReceiving)> {
        // Opening waits for the other side to open the same pipe: both sides open the pipes in the same order.
        if job.role == Role::Asker {
            let sending = writer(job, "there")?;
            Ok((sending, reader(job, "back")?))
        } else {
            let receiving = reader(job, "there")?;
            Ok((writer(job, "back")?, receiving))
        }
    }
}

fn writer(job: &Job, name: &str) -> Result<FramedSending> {
    let fd = open(&job.directory.join(name), OFlags::WRONLY)?;
    Ok(FramedSending::new(Wire::outgoing(fd, job.wait)?, false))
}

fn reader(job: &Job, name: &str) -> Result<FramedReceiving> {
    let fd = open(&job.directory.join(name), OFlags::RDONLY)?;
    Ok(FramedReceiving::new(Wire::incoming(fd, job.wait)?, false, job.sizes.max as usize))
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
