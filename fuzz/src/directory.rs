//! The files of a path channel.

use crate::program::Program;
use crate::raw::{Shown, use_receiver, use_sender};
use pelton::{Error, Options, inspect};
use pelton_testkit::{TestDir, descriptors};
use std::fs::File;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::atomic::Ordering;

/// The target creates a channel with some messages and closes it. The program changes its files, their sizes and kinds
/// too. Then senders and receivers open it, and the program continues to change words while they use it.
pub fn directory(program: &[u8]) {
    let before = descriptors();
    let mut program = Program(program);
    let place = TestDir::unwatched();
    let path = place.path().join("c");
    let options = Options::new().capacity(65536).lanes(program.of(&[1, 2, 3])).traced(program.byte() % 2 == 0);
    {
        let mut senders = [options.create_sender(&path).ok(), options.create_sender(&path).ok()];
        for sender in senders.iter_mut().flatten() {
            (0..1 + program.below(20)).for_each(|i| {
                let _ = sender.try_send(&vec![i as u8; 700 * i]).unwrap();
            });
        }
        let mut receiver = options.cast().open_receiver(&path).unwrap();
        (0..program.below(20)).for_each(|_| drop(receiver.try_receive()));
    }
    for _ in 0..program.below(4) {
        damage(&path, &mut program);
    }
    let _ = (inspect::info(&path).map_err(refused), inspect::check(&path, program.byte() % 2 == 0).map_err(refused));
    if program.byte() % 4 == 0 {
        let _ = inspect::recover(&path, program.byte() % 2 == 0).map_err(refused);
    }
    let mut receiver = options.cast().open_receiver(&path).map_err(refused).ok();
    let mut sender = options.cast().open_sender(&path).map_err(refused).ok();
    let mapped: Vec<Shown> = FILES
        .iter()
        .filter_map(|name| File::options().read(true).write(true).open(path.join(name)).ok())
        .filter(|file| file.metadata().unwrap().len() >= 4096 && file.metadata().unwrap().is_file())
        .map(|file| Shown::of(file.into()))
        .collect();
    for _ in 0..1 + program.below(8) {
        if let Some(shown) = (!mapped.is_empty()).then(|| &mapped[program.below(mapped.len())]) {
            let word = shown.word(8 * program.below(64));
            word.store(program.lie(word.load(Ordering::Relaxed)), Ordering::Release);
        }
        // A word of `channel` may claim more lanes than there are.
        if let Some(sender) = &mut sender {
            use_sender_of_path(sender);
        }
        if let Some(receiver) = &mut receiver {
            use_receiver_of_path(receiver);
        }
        let _ = inspect::info(&path).map_err(refused);
    }
    drop((receiver, sender, mapped));
    let _ = inspect::recover(&path, true).map_err(refused);
    let _ = inspect::remove(&path).map_err(refused);
    drop(place);
    assert_eq!(descriptors(), before, "descriptors were kept");
}

const FILES: [&str; 6] = ["channel", "receiver", "0.producer", "0.consumer", "0.data", "1.producer"];

/// The errors that opening it may return.
fn refused(error: Error) {
    match error {
        Error::Corrupt(_) | Error::NotAChannel { .. } | Error::Rebooted { .. } | Error::RoleTaken { .. } => {}
        Error::NoChannel { .. } => {}
        error => panic!("{error}"),
    }
}

/// Users that find a channel corrupt report that, and stop.
fn use_sender_of_path(sender: &mut pelton::Sender) {
    match sender.arm(0) {
        Err(error @ (Error::NotAChannel { .. } | Error::Corrupt(_))) => refused(error),
        _ => use_sender(sender, "a path's"),
    }
}

fn use_receiver_of_path(receiver: &mut pelton::Receiver) {
    match receiver.arm() {
        Err(error @ (Error::NotAChannel { .. } | Error::Corrupt(_))) => refused(error),
        _ => use_receiver(receiver, None, "a path's"),
    }
}

/// Changes one file.
fn damage(path: &Path, program: &mut Program) {
    let name = program.of(&[
        "channel",
        "receiver",
        "0.producer",
        "0.consumer",
        "0.data",
        "1.producer",
        "1.data",
        "receiver.bell",
        "receiver.life",
        "0.bell",
        "0.life",
    ]);
    let file = path.join(name);
    let change = program.byte();
    let _ = match change {
        // Mostly words: at its beginning, or anywhere.
        0..=180 => {
            let Ok(open) = File::options().read(true).write(true).open(&file) else { return };
            if !open.metadata().unwrap().is_file() {
                return;
            }
            let at = 8 * program.below(if change < 160 { 64 } else { 8192 }) as u64;
            let mut word = [0; 8];
            let _ = rustix::io::pread(&open, &mut word, at);
            let lie = program.lie(u64::from_le_bytes(word));
            rustix::io::pwrite(&open, &lie.to_le_bytes(), at).map(|_| ()).map_err(Into::into)
        }
        181..=200 => match std::fs::symlink_metadata(&file) {
            Ok(found) if found.is_file() => {
                let bytes = program.of(&[0, 1, 119, 4096, 65535, 65536, 65537, 1 << 34]);
                File::options().write(true).open(&file).and_then(|open| open.set_len(bytes))
            }
            _ => Ok(()),
        },
        201..=210 => std::fs::remove_file(&file),
        211..=220 => std::fs::remove_file(&file).and_then(|()| std::os::unix::fs::symlink("/dev/zero", &file)),
        221..=230 => std::fs::remove_file(&file).and_then(|()| std::fs::create_dir(&file)),
        231..=240 => std::fs::remove_file(&file).and_then(|()| {
            let mode = rustix::fs::Mode::from_raw_mode(0o600);
            rustix::fs::mkfifoat(rustix::fs::CWD, &file, mode).map_err(Into::into)
        }),
        241..=248 => std::fs::remove_file(&file).and_then(|()| File::create(&file).map(|_| ())),
        _ => std::fs::set_permissions(&file, std::fs::Permissions::from_mode(program.of(&[0, 0o400, 0o666, 0o4700]))),
    };
}
