#![allow(warnings)]
use crate::error::Result;
use crate::os::{Bell, Descriptor, Segment};
use std::path::Path;
pub(crate) struct Access {
    pub(crate) uids: Vec<u32>,
    pub(crate) mode: u32,
}
#[derive(Debug)]
pub(crate) struct Directory {}
impl Directory {
    pub(crate) fn open(path: &Path, access: &Access) -> Result<Option<Directory>> {
        todo!()
    }
    pub(crate) fn create(
        path: &Path,
        access: &Access,
        capacity: u64,
        message_bytes_max: u64,
        lanes_max: u32,
    ) -> Result<Directory> {
        todo!()
    }
    pub(crate) fn path(&self) -> &Path {
        todo!()
    }
    pub(crate) fn message_bytes_max(&self) -> u64 {
        todo!()
    }
    pub(crate) fn lanes(&self) -> Result<u32> {
        todo!()
    }
    pub(crate) fn claim_receiver(&self) -> Result<ReceiverRole> {
        todo!()
    }
    pub(crate) fn claim_sender(&self) -> Result<SenderRole> {
        todo!()
    }
    pub(crate) fn lane_for_receiver(&self, number: u32) -> Result<LaneForReceiver> {
        todo!()
    }
    pub(crate) fn watch_receiver(&self) -> Result<Option<Descriptor>> {
        todo!()
    }
    pub(crate) fn watch_sender(&self, number: u32) -> Result<Option<Descriptor>> {
        todo!()
    }
}
pub(crate) struct ReceiverRole {
    pub(crate) lock: Descriptor,
    pub(crate) page: Segment,
    pub(crate) bell: Bell,
    pub(crate) life: Descriptor,
}
pub(crate) struct SenderRole {
    pub(crate) number: u32,
    pub(crate) lock: Descriptor,
    pub(crate) page: Segment,
    pub(crate) data: Segment,
    pub(crate) consumer: Segment,
    pub(crate) receiver: Segment,
    pub(crate) bell: Bell,
    pub(crate) receiver_bell: Bell,
    pub(crate) life: Descriptor,
}
pub(crate) struct LaneForReceiver {
    pub(crate) producer: Segment,
    pub(crate) data: Segment,
    pub(crate) consumer: Segment,
    pub(crate) bell: Bell,
}
impl Segment {
    pub(crate) fn sync(&self) -> std::io::Result<()> {
        todo!()
    }
    pub(crate) fn allocate(&self, a: u64, b: u64) -> std::io::Result<()> {
        todo!()
    }
}
