//! As a stream, but both sides work for each message, and one of them ten times as long as the other: one of them waits
//! most of the time. The loops are those of a stream.

use anyhow::Result;
use clap::{Args, ValueEnum};

use crate::{
    parameters::word,
    plan::{Common, Defaults, ONE_WAY, Options, Passes, Plan},
    record::{RATES, SHARES},
    run::exchange,
};

/// A stream whose sides work for each message, one of them ten times as long as the other
///
/// Defaults: 256 bytes, lanes of 1 MiB, so that the lane is full or empty many times, and as many messages as take the
/// slow side two seconds of work.
#[derive(Args)]
pub struct Lopsided {
    /// The side that works ten times as long as the other
    #[arg(long, value_name = "SIDE", default_value = "receiver")]
    slow: Slow,

    /// Microseconds of its work for each message
    #[arg(long, value_name = "US", default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    work: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Slow {
    /// The sender waits for free space most of the time
    Receiver,
    /// The receiver waits for messages most of the time
    Sender,
}

impl Options for Lopsided {
    const NAME: &str = "lopsided";

    fn plan(&self, common: &Common) -> Result<Plan> {
        common.no_seconds(Self::NAME)?;
        let defaults =
            Defaults { capacity: 1 << 20, sleeps: true, systems: "pelton,sock-stream,sock-seqpacket", ..ONE_WAY };
        let plan = common.plan::<Self>(defaults, |_| (2_000_000 / self.work).max(1))?;
        let (slow_ns, fast_ns) = (1000 * self.work, 100 * self.work);
        Ok(Plan {
            work_ns: match self.slow {
                Slow::Receiver => [slow_ns, fast_ns],
                Slow::Sender => [fast_ns, slow_ns],
            },
            alone: true,
            passes: Passes::Counted,
            own: vec![("slow", word(self.slow).into()), ("work_us", self.work.into())],
            figure: Some("share_of_own_speed"),
            columns: vec![RATES, SHARES],
            run: exchange,
            ..plan
        })
    }
}
