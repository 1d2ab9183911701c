//! What a measurement consists of: a workload with its options, and systems with their capabilities.
//!
//! The types are here; the workloads are a table in `workloads`, the systems one in `systems`.

use std::{collections::BTreeMap, env, ffi::OsString, fmt, path::PathBuf};

use anyhow::{Result, bail, ensure};
use clap::{ArgMatches, Args, Command, FromArgMatches};
use serde_json::{Map, Value, json};

use crate::{
    parameters::{Calls, Job, Kind, Launch, Pass, Placement, Process, Role, SizeRange, Wait, word},
    record::{Column, Run},
    sides::Interrupts,
};

/// The part of one side: the whole of its process.
pub type Part = fn(&Job) -> Result<()>;

/// How a system waits.
#[derive(Clone, Copy, Debug)]
pub enum Waits {
    /// As `--wait` says
    AsAsked,
    /// Where pelton spins by default: so in one direction, and so there and back. One way as its documentation
    /// recommends. There and back it spins as pelton does, if it can: otherwise wake-ups would be compared with none
    Best(Wait, Wait),
    /// In a way of its own
    Own(fn(&Plan) -> Wait),
}

/// A system: what it can do, and how it is started.
#[derive(Clone, Copy)]
pub struct System {
    /// Its word on the command line
    pub name: &'static str,
    /// What it is, for `--help`
    pub about: &'static str,
    /// What it can do, and by which code
    pub sides: &'static [(Kind, Part)],
    /// Of the workloads between two processes only these; all if there is none
    pub only: &'static [&'static str],
    /// Its sides can be in libuv's loop
    pub in_libuv: bool,
    /// How it waits
    pub waits: Waits,
    /// The version of its library, of the kernel, or of the program
    pub version: fn(&System) -> String,
    /// Builds what it needs, before any measurement. Returns the program to start; empty for this one
    pub build: fn(&System, &Plan, Wait) -> Result<Vec<OsString>>,
    /// What its processes are like
    pub process: Process,
    /// The part of `./run test-bench` that builds and measures it; None if `./run test` does
    pub suite: Option<&'static str>,
    /// Its run, if that is not the workload's own
    pub run: Option<RunOnce>,
    /// Its plan, if it is a variant of another system, or measures another workload beside this one
    pub vary: fn(&mut Plan),
}

/// What most systems have: sides in this program, pinned, that wait as asked.
pub const SYSTEM: System = System {
    name: "",
    about: "",
    sides: &[],
    only: &[],
    in_libuv: false,
    waits: Waits::AsAsked,
    version: |_| kernel(),
    build: |_, _, _| Ok(Vec::new()),
    process: Process {
        is_both: false,
        is_unpinned: false,
        is_foreign: false,
        is_service_only: false,
        in_shared_memory: false,
    },
    suite: None,
    run: None,
    vary: |_| (),
};

/// The version of a system that is the kernel's.
pub fn kernel() -> String {
    format!("Linux {}", rustix::system::uname().release().to_string_lossy())
}

impl System {
    /// Its code for that plan, or why it has none.
    pub fn part(&self, kind: Kind, workload: &str) -> Result<Part> {
        let found = self.sides.iter().find(|(of, _)| *of == kind).map(|(_, part)| *part);
        let allowed = kind != Kind::Processes || self.only.is_empty() || self.only.contains(&workload);
        match found.filter(|_| allowed) {
            Some(part) => Ok(part),
            None => bail!("it has no part in {workload}: measure it with {}", self.elsewhere()),
        }
    }

    /// The workloads that it has a part in.
    pub fn elsewhere(&self) -> String {
        let words = |kind: &Kind| match kind {
            Kind::Processes if self.only.is_empty() => "stream or any other workload of two processes".to_string(),
            Kind::Processes => self.only.join(" or "),
            Kind::Threads => "threads".to_string(),
            Kind::FanIn => "fan-in".to_string(),
            Kind::Broadcast => "broadcast".to_string(),
            Kind::Call => "call".to_string(),
            Kind::Append => "append".to_string(),
            Kind::AppendFile => "append --file DIR".to_string(),
            Kind::Successors => "reattach".to_string(),
        };
        self.sides.iter().map(|(kind, _)| words(kind)).collect::<Vec<_>>().join(", ")
    }

    /// How it waits in that plan, unless the list of systems says so itself.
    pub fn wait(&self, plan: &Plan, asked: Option<Wait>) -> Wait {
        match self.waits {
            Waits::Best(one_way, there_and_back) if asked.is_none() && plan.wait == Wait::Spin => {
                if plan.job.launch.roles.first() == Some(&Role::Asker) { there_and_back } else { one_way }
            }
            Waits::Own(wait) => wait(plan),
            _ => asked.unwrap_or(plan.wait),
        }
    }
}

/// A system of the list, which may have a wait of its own.
#[derive(Clone)]
pub struct Choice {
    /// The system
    pub system: &'static System,
    /// Overrides `--wait`
    pub wait: Option<Wait>,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.wait {
            Some(wait) => write!(f, "{}:{}", self.system.name, word(wait)),
            None => f.write_str(self.system.name),
        }
    }
}

/// Makes one run. An interrupt ends every wait.
pub type RunOnce = fn(&Job, &Interrupts) -> Result<Run>;

/// A measurement, as the command line requests it.
#[derive(Clone)]
pub struct Plan {
    /// What all processes get, but for what depends on the system and the role
    pub job: Job,
    /// Messages, or rounds of a round trip; with `seconds` the maximum
    pub count: u64,
    /// Each system has as many as last about so long, instead of the same number
    pub seconds: Option<f64>,
    /// How the sides wait, unless the system has a wait of its own
    pub wait: Wait,
    /// Runs of each system
    pub runs: usize,
    /// Where the sides run; None: they are never pinned
    pub placement: Option<Placement>,
    /// Threads that compute meanwhile
    pub beside_load: u32,
    /// Percent of one processor that the measured processes get together
    pub quota: Option<u32>,
    /// Nanoseconds of work of the first role's sides and of the second's for each message
    pub work_ns: [u64; 2],
    /// The work's time alone is measured too
    pub alone: bool,
    /// A pass before the measured one touches the memory; and single rounds are timed. Neither: one pass, no other
    pub passes: Passes,
    /// More of its parameters in the results
    pub own: Vec<(&'static str, Value)>,
    /// The figure that the ratios are of
    pub figure: Option<&'static str>,
    /// The table's columns, in groups
    pub columns: Vec<&'static [Column]>,
    /// Makes a run
    pub run: RunOnce,
    /// The systems, as on the command line
    pub systems: String,
}

/// The passes of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passes {
    /// One, without a count of system calls
    One,
    /// One, and one that counts system calls
    Counted,
    /// A warm-up before, and as `Counted`
    Warmed,
    /// As `Warmed`, and single rounds are timed, in a pass of their own where the clock would disturb the first
    Timed,
}

impl Plan {
    /// The passes of each run. The first after the warm-up makes the figures; the passes after it have what would
    /// disturb it. `foreign`: system calls are counted from outside.
    pub fn passes(&self, wait: Wait, count_calls: bool, foreign: bool) -> Vec<Pass> {
        let Job { calls, delay_us, senders, .. } = &self.job;
        if self.passes == Passes::One {
            return vec![Pass { count: self.count, ..Pass::default() }];
        }
        // Two clock reads cost some 50 ns. A round trip that sleeps takes a hundred times as long and can bear it. One
        // that spins takes 250 ns and cannot: its mean is of a pass without, its percentiles of a second pass of half
        // the count. With many calls in flight none is that short.
        let timed = self.passes == Passes::Timed;
        let rests = *delay_us > 0 || calls.rate.is_some();
        let time_apart = timed && !(calls.one_by_one() && (wait != Wait::Spin || rests));
        let mut passes = Vec::new();
        if self.passes != Passes::Counted && calls.rate.is_none() && !calls.beside_flood {
            // The first touch of memory takes a page fault, and the shortest pass would pay most for it.
            let count = self.count.div_ceil(4).max(u64::from(*senders));
            passes.push(Pass { count, warms_up: true, ..Pass::default() });
        }
        passes.push(Pass { count: self.count, time_each: timed && !time_apart, ..Pass::default() });
        if self.alone {
            passes.push(Pass { count: self.count, alone: true, ..Pass::default() });
        }
        if time_apart {
            passes.push(Pass { count: self.count.div_ceil(2), time_each: true, ..Pass::default() });
        }
        // The flooding client's calls are not measured.
        if count_calls && !calls.beside_flood {
            // Enough to find one call in ten thousand messages.
            let enough = if calls.rate.is_some() { 1 } else { 100_000 };
            let count = self.count.min((self.count / 4).max(enough).max(u64::from(*senders)));
            if foreign {
                // The calls that a side makes to take orders and to report: an empty pass has only those.
                passes.push(Pass { count: 0, count_calls: true, ..Pass::default() });
            }
            passes.push(Pass { count, count_calls: true, ..Pass::default() });
        }
        passes
    }

    /// The parameters in the results.
    pub fn parameters(&self, count: u64, cpus: &[usize]) -> Value {
        let mut all = json!({
            "size": self.job.sizes.to_string(), "count": count, "seconds": self.seconds,
            "capacity": self.job.capacity, "delay_us": self.job.delay_us, "runs": self.runs,
            "placement": self.placement.map(word), "cpus": cpus, "beside_load": self.beside_load, "quota": self.quota,
        });
        all.as_object_mut()
            .expect("it was made as an object")
            .extend(self.own.iter().map(|(name, value)| (name.to_string(), value.clone())).collect::<Map<_, _>>());
        all
    }
}

/// A workload: its subcommand.
pub struct Workload {
    /// Its word on the command line
    pub name: &'static str,
    /// Adds its options
    pub command: fn(Command) -> Command,
    /// Reads them
    pub plan: fn(&ArgMatches) -> Result<(Plan, Output)>,
}

/// The options that only one workload has, as clap reads them. The comment of their type is the help of the subcommand.
pub trait Options: Args {
    /// The workload's word on the command line
    const NAME: &str;

    /// Checks them and those of all workloads
    fn plan(&self, common: &Common) -> Result<Plan>;
}

/// The workload with those options.
pub const fn workload<O: Options>() -> Workload {
    Workload {
        name: O::NAME,
        command: |command| O::augment_args(Common::augment_args(command)),
        plan: |matches| {
            let common = Common::from_arg_matches(matches)?;
            Ok((O::from_arg_matches(matches)?.plan(&common)?, common.output))
        },
    }
}

/// Where the results go.
#[derive(Args, Clone, Debug, Default)]
pub struct Output {
    /// Writes a page of the results, which needs no other file and no network
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,

    /// Writes a results file: the machine, and the lines of --json
    #[arg(long, value_name = "FILE.jsonl")]
    pub results: Option<PathBuf>,

    /// One JSON object a line for each system, then one of ratios, instead of the table
    #[arg(long)]
    pub json: bool,
}

/// The options of all workloads.
#[derive(Args, Clone, Debug)]
pub struct Common {
    /// Bytes of a message, or MIN..MAX for random ones
    #[arg(long, value_name = "N|MIN..MAX")]
    pub size: Option<SizeRange>,

    /// Messages, rounds or calls of a run, of all senders or clients together; of an append, each thread's
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,

    /// Gives each system as many messages, rounds or calls as last about S seconds, instead of the same number; with
    /// --count at most N
    ///
    /// One time slice and some page faults decide a pass of milliseconds, and a fast system's pass is the shortest.
    /// Some runs before the first find the number.
    #[arg(long, value_name = "S")]
    pub seconds: Option<f64>,

    /// Bytes of a pelton or limits lane
    #[arg(long, value_name = "BYTES")]
    pub capacity: Option<u64>,

    /// How both sides wait [default: spin where both are busy on a processor of their own, otherwise block; a system
    /// of bench/peers as it performs best]
    #[arg(long)]
    pub wait: Option<Wait>,

    /// How often each system is measured
    #[arg(long, value_name = "N", default_value_t = 9)]
    pub runs: usize,

    /// Where the processes run
    #[arg(long, value_enum, default_value_t = Placement::Apart)]
    pub placement: Placement,

    /// So many other threads that only compute, at normal priority, run meanwhile
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub beside_load: u32,

    /// The measured processes together get that much of one processor, by a control group; needs root
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..))]
    pub quota: Option<u32>,

    /// Systems, in turn; the first is compared with the others. `./run bench systems` lists them
    ///
    /// A system may have its own wait: `pelton:block,pelton:spin` compares the two in one interleaved run.
    #[arg(long, value_name = "A,B,...")]
    pub systems: Option<String>,

    /// Where the results go
    #[command(flatten)]
    pub output: Output,
}

/// The defaults of a workload, and what else its plan begins with.
pub struct Defaults {
    /// See [`Kind`]
    pub kind: Kind,
    /// The roles, that of the first CPU first
    pub roles: &'static [Role],
    /// Bytes of a message
    pub size: u32,
    /// Bytes of a lane
    pub capacity: u64,
    /// Sides that sleep by default, also on processors of their own
    pub sleeps: bool,
    /// The systems
    pub systems: &'static str,
}

/// Of a stream: messages one way between two processes.
pub const ONE_WAY: Defaults = Defaults {
    kind: Kind::Processes,
    roles: &[Role::Receiver, Role::Sender],
    size: 256,
    capacity: 64 << 20,
    sleeps: false,
    systems: "",
};
/// Of a round trip: messages there and back.
pub const THERE_AND_BACK: Defaults = Defaults { roles: &[Role::Asker, Role::Answerer], size: 64, ..ONE_WAY };

impl Common {
    /// The plan, of `count` messages if the command line says nothing else, with the options of all workloads checked.
    pub fn plan<O: Options>(&self, defaults: Defaults, count: impl FnOnce(SizeRange) -> u64) -> Result<Plan> {
        let sizes = self.size.unwrap_or(SizeRange::fixed(defaults.size));
        let capacity = self.capacity.unwrap_or(defaults.capacity);
        // Larger requests and replies travel in pieces.
        ensure!(
            defaults.kind == Kind::Call || u64::from(sizes.max) + 32 <= capacity / 2,
            "found messages of {} bytes in lanes of {capacity}, wanted at most half the capacity less 32: write --capacity {} or more",
            sizes.max,
            (2 * (u64::from(sizes.max) + 32)).next_power_of_two()
        );
        let most = self.seconds.map(|_| i32::MAX as u64); // the largest count of limits.c
        let count = self.count.or(most).unwrap_or_else(|| count(sizes));
        // Deadlines and totals are computed from it: stay far from overflow.
        ensure!((1..=1 << 40).contains(&count), "found --count {count}, wanted 1 to {}", 1u64 << 40);
        if let Some(seconds) = self.seconds {
            ensure!((0.001..=600.0).contains(&seconds), "found --seconds {seconds}, wanted 0.001 to 600");
        }
        ensure!(self.runs > 0, "found --runs 0, wanted at least 1");
        let is_busy = self.placement != Placement::Apart || self.beside_load > 0 || self.quota.is_some();
        let job = Job {
            system: String::new(),
            wait: Wait::Spin,
            workload: O::NAME.to_string(),
            kind: defaults.kind,
            role: defaults.roles[0],
            sizes,
            capacity,
            delay_us: 0,
            work_steps: [0; 2],
            senders: 1,
            idle: 0,
            receivers: 1,
            calls: Calls::default(),
            index: 0,
            threads: 0,
            passes: Vec::new(),
            cpu: None,
            cpus: Vec::new(),
            directory: env::temp_dir(),
            options: BTreeMap::new(),
            messages_each: 1,
            launch: Launch { roles: defaults.roles, ..Launch::default() },
        };
        Ok(Plan {
            job,
            count,
            seconds: self.seconds,
            wait: self.wait.unwrap_or(if is_busy || defaults.sleeps { Wait::Block } else { Wait::Spin }),
            runs: self.runs,
            placement: Some(self.placement),
            beside_load: self.beside_load,
            quota: self.quota,
            work_ns: [0; 2],
            alone: false,
            passes: Passes::Warmed,
            own: Vec::new(),
            figure: None,
            columns: Vec::new(),
            run: |_, _| bail!("a workload has no run"),
            systems: self.systems.clone().unwrap_or(defaults.systems.to_string()),
        })
    }

    /// Refuses random sizes.
    pub fn one_size(&self, what: &str) -> Result<()> {
        if let Some(sizes) = self.size {
            ensure!(sizes.is_fixed(), "found --size {sizes} with {what}, wanted one size");
        }
        Ok(())
    }

    /// Refuses `--seconds` in a workload whose count is not its duration.
    pub fn no_seconds(&self, what: &str) -> Result<()> {
        ensure!(
            self.seconds.is_none(),
            "found --seconds with {what}, wanted stream, roundtrip, threads, fan-in or call without a rate: use --count"
        );
        Ok(())
    }
}

#[cfg(test)]
#[allow(missing_docs)]
pub mod tests {
    use super::*;

    /// A plan of round trips for tests.
    pub fn plan() -> Plan {
        let command = "roundtrip --delay 20 --count 1000 --runs 1 --capacity 1048576 --systems pipe";
        crate::commands::Measurement::parse(command).unwrap().plan
    }

    /// A job of a workload with those roles.
    pub fn job_of(roles: &'static [Role], passes: Vec<Pass>) -> Job {
        let job = plan().job;
        let launch = Launch { roles, ..Launch::default() };
        Job { role: roles[0], passes, messages_each: 1, launch, wait: Wait::Block, ..job }
    }

    #[test]
    fn single_rounds_are_timed_in_a_separate_pass_only_where_the_clock_would_disturb() {
        let warm = Pass { count: 250, warms_up: true, ..Pass::default() };
        let counted = Pass { count: 1000, count_calls: true, ..Pass::default() };
        let asleep = plan().passes(Wait::Block, true, false);
        assert_eq!(asleep, [warm, Pass { count: 1000, time_each: true, ..Pass::default() }, counted]);
        let mut busy = plan();
        busy.job.delay_us = 0;
        assert_eq!(
            busy.passes(Wait::Spin, false, false),
            [warm, Pass { count: 1000, ..Pass::default() }, Pass { count: 500, time_each: true, ..Pass::default() }]
        );
        let foreign = plan().passes(Wait::Block, true, true);
        assert_eq!(foreign[2..], [Pass { count: 0, ..counted }, counted]);
        // One message a second is not warmed up for.
        busy.job.calls.rate = Some(1);
        let rated = busy.passes(Wait::Block, false, false);
        assert_eq!(rated, [Pass { count: 1000, time_each: true, ..Pass::default() }]);
        let works = Plan { passes: Passes::Counted, alone: true, ..plan() };
        assert_eq!(
            works.passes(Wait::Block, false, false),
            [Pass { count: 1000, ..Pass::default() }, Pass { count: 1000, alone: true, ..Pass::default() }]
        );
    }
}
