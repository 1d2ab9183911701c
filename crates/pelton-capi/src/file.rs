//! Open files, which operations of engines use.

use crate::c::{AnyPath, New};
use crate::code::{self, done};
use crate::entries::entries;
use crate::handle::{Kind, Object};
use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

pub struct File(pub pelton::file::File);

impl Object for File {
    const KIND: Kind = Kind::File;

    fn is_forked(&self) -> bool {
        !self.0.is_own()
    }
}

entries! {
    fn pelton_file_from_fd(fd: c_int, name: AnyPath, out: New<File>) {
        // SAFETY: it reads the flags of a number, whatever that is.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
            return Err(code::system(libc::EBADF, "the descriptor is not open"));
        }
        // SAFETY: it is open, and the C caller passes it on.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        out.give(File(done(pelton::file::File::from_fd(fd, name.to_owned()))?))
    }

    fn pelton_file_fd(file: &File) {
        Ok(file.0.as_fd().as_raw_fd())
    }
}
