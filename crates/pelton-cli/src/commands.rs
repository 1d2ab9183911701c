//! The commands of `pelton`, a file for each: its options, and its `run`.

pub mod bridge;
pub mod call;
pub mod cat;
pub mod conform;
pub mod cp;
pub mod doctor;
pub mod flush;
pub mod info;
pub mod ls;
pub mod metrics;
pub mod ping;
pub mod publish;
pub mod record;
pub mod recover;
pub mod recv;
pub mod replay;
pub mod rm;
pub mod run;
pub mod send;
pub mod serve;
pub mod stat;
pub mod subscribe;
pub mod tail;
pub mod top;
