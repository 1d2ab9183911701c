//! A channel as a whole: the process that creates, recovers or removes it is killed or stopped.

use super::*;

pub fn create(run: &Run, sends: bool) {
    let path = run.path();
    let victim = fork(Last::Killed, |inside| -> Box<dyn Any> {
        inside.count();
        if sends {
            let mut sending = Sending::new(with_capacity(SMALL).create_sender(&path).unwrap(), 100);
            sending.commit(1);
            Box::new(sending)
        } else {
            Box::new(with_capacity(SMALL).create_receiver(&path).unwrap())
        }
    });
    // Another process neither waits for a stopped creator nor creates what the creator has finished.
    run.finish(victim, || match with_capacity(SMALL).create_receiver(run.path()) {
        Ok(_) => {}
        // It has the role that it wanted.
        Err(Error::RoleTaken { .. }) if !sends => {}
        role => panic!("{role:?}"),
    });
    created_by_another(run);
}

/// Whatever a dead creator left, the next process creates or opens the channel, and it works; nothing else is left.
fn created_by_another(run: &Run) {
    let mut receiving = Receiving::new(with_capacity(SMALL).create_receiver(run.path()).unwrap(), 100);
    run.only_the_channel_is_left(1);
    let sender = with_capacity(SMALL).create_sender(run.path()).unwrap();
    let sent = u64::from(sender.next_seq()) - 1;
    receiving.read_to(sent);
    all_committed_arrived(sent, 1);
    resume_both(sender, &mut receiving);
    drop(receiving);
    run.only_the_channel_is_left(1);
}

pub fn create_over_leftovers(run: &Run) {
    // The remains of two dead creators: one had just begun, the other had made more progress.
    std::fs::create_dir(run.root.join(".channel.pelton-1-0")).unwrap();
    let temporary = run.root.join(".channel.pelton-2-7");
    std::fs::create_dir(&temporary).unwrap();
    for name in ["channel", "receiver", "0.data"] {
        std::fs::write(temporary.join(name), "").unwrap();
    }
    create(run, true);
}

/// Rewrites words of a file, unnoticed by its users.
fn poke(path: &Path, offset: u64, bytes: &[u8]) {
    use std::os::unix::fs::FileExt as _;
    std::fs::OpenOptions::new().write(true).open(path).unwrap().write_all_at(bytes, offset).unwrap();
}

pub fn recover(run: &Run) {
    let path = run.path();
    {
        let lanes = with_capacity(SMALL).lanes(2);
        let mut both = [lanes.create_sender(&path).unwrap(), lanes.create_sender(&path).unwrap()]
            .map(|sender| Sending::new(sender, 100));
        for sending in &mut both {
            sending.send(5);
            sending.sender.sync().unwrap();
            sending.send(3);
        }
    }
    // As if created in another boot.
    let mut header = std::fs::read(path.join("channel")).unwrap();
    header[96..112].fill(7);
    let checksum = pelton_lane::fnv1a(&header[..112]);
    header[112..120].copy_from_slice(&checksum.to_le_bytes());
    poke(&path.join("channel"), 0, &header[..120]);
    ["0.producer", "1.producer"].iter().for_each(|name| poke(&path.join(name), 96, &[7; 16]));
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        inspect::recover(&path, false).unwrap()
    });
    run.finish(victim, || match opened().open_sender(&path) {
        Err(Error::Rebooted { .. } | Error::RoleTaken { .. }) => {}
        // It has released its roles, and ends.
        sender => assert_eq!(shared().step(), "lock: given back", "{sender:?}"),
    });
    let done = inspect::recover(&path, false).unwrap();
    assert!(done.iter().all(|lane| lane.kept == 5), "{done:?}");
    assert!(inspect::check(&path, false).unwrap().iter().all(inspect::RecoveredLane::is_whole));
    let mut receiving = Receiving::new(opened().open_receiver(&path).unwrap(), 100);
    receiving.read(10);
    assert_eq!(receiving.next, [5, 5, 0]);
    resume_both(opened().open_sender(&path).unwrap(), &mut receiving);
    drop(receiving);
    run.only_the_channel_is_left(2);
}

pub fn remove(run: &Run) {
    let path = run.path();
    Sending::new(with_capacity(SMALL).create_sender(&path).unwrap(), 100).send(3);
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        inspect::remove(&path).unwrap();
    });
    run.finish(victim, || ());
    // The channel is complete or absent; then the next creator removes the remains.
    if path.exists() {
        shared().committed.store(3, SeqCst);
    }
    created_by_another(run);
    inspect::remove(&path).unwrap();
    assert_eq!(run.left(), Vec::<String>::new());
}
