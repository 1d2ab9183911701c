//! The files of path channels: what is refused, what a crash leaves, who has which role.

use super::*;

#[test]
fn a_channel_is_made_opened_used_and_removed() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("channel");
    let access = Access { uids: Vec::new(), mode: 0o700 };
    assert!(Directory::open(&path, &access).unwrap().is_none());
    let directory = Directory::create(&path, &access, 1 << 20, 1000, 2).unwrap();
    let receiver = directory.claim_receiver().unwrap();
    let sender = directory.claim_sender().unwrap();
    assert_eq!((sender.number, directory.lanes().unwrap()), (0, 1));
    assert_eq!(directory.claim_sender().unwrap().number, 1);
    drop((receiver, sender));
    directory.remove().unwrap();
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
}
