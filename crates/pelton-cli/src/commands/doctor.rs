//! `pelton doctor`: what this machine and this user can do, and what is wrong with a channel.

use crate::{
    commands::stat::no_channel,
    failure::Failure,
    observed::{Where, counted, name_of, named, one_line, percent_of, short, short_bytes, short_time, side},
    output::{json, print},
};
use clap::Args;
use pelton::observe::{Activity, Channel, Kind, Reading, Side, State};
use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create},
    process::{PidfdFlags, Resource, geteuid, getpid, getrlimit, pidfd_open},
    thread::{MembarrierCommand, membarrier, membarrier_query},
};
use serde::Serialize;
use serde_json::json;
use std::{
    fs,
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// How long the rates of a channel are measured.
const INTERVAL: Duration = Duration::from_secs(1);

/// Options of `pelton doctor`.
#[derive(Args)]
pub struct DoctorArgs {
    /// Say what is wrong with this channel: a short name, unix:PATH, path:DIR, or a DIR with a slash
    #[arg(long, value_name = "NAME")]
    channel: Option<String>,
    #[command(flatten)]
    place: Where,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Runs `pelton doctor`.
pub fn run(args: &DoctorArgs) -> Result<(), Failure> {
    match &args.channel {
        Some(name) => channel(name, args),
        None => machine(args),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Health {
    Ok,
    Degraded,
    Broken,
}

/// One thing that was checked.
#[derive(Debug, Serialize)]
struct Check {
    what: &'static str,
    health: Health,
    found: String,
    /// What to do about it; empty if nothing.
    advice: String,
}

impl Check {
    fn ok(what: &'static str, found: impl Into<String>) -> Check {
        Check { what, health: Health::Ok, found: found.into(), advice: String::new() }
    }

    fn degraded(what: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Check {
        Check { what, health: Health::Degraded, found: found.into(), advice: advice.into() }
    }

    fn broken(what: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Check {
        Check { what, health: Health::Broken, found: found.into(), advice: advice.into() }
    }
}

fn machine(args: &DoctorArgs) -> Result<(), Failure> {
    let checks = [
        kernel(),
        barrier(),
        memfd(),
        observing(),
        pidfd(),
        io_uring(),
        descriptors(),
        file_size(),
        memory(),
        runtime_directory(),
        seccomp(),
        container(),
        processors(),
        clock(),
    ];
    if args.json {
        print(json(&json!({ "checks": checks })))?;
    } else {
        for Check { what, health, found, advice } in &checks {
            let health = match health {
                Health::Ok => "ok",
                Health::Degraded => "degraded",
                Health::Broken => "BROKEN",
            };
            print(format!("{health:8} {what:17} {}\n", one_line(found)))?;
            if !advice.is_empty() {
                print(format!("{:26} {}\n", "", one_line(advice)))?;
            }
        }
    }
    match checks.iter().filter(|check| check.health == Health::Broken).count() {
        0 => Ok(()),
        broken => Err(Failure::Peer(format!("{broken} of {} checks failed", checks.len()))),
    }
}

fn first_line(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok()?.lines().next().map(str::to_owned)
}

fn kernel() -> Check {
    let release = first_line("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    match (numbers.next(), numbers.next()) {
        (Some(major), Some(minor)) if (major, minor) >= (5, 10) => Check::ok("kernel", format!("Linux {release}")),
        _ => Check::broken("kernel", format!("Linux {release:?}"), "use Linux 5.10 or later"),
    }
}

fn barrier() -> Check {
    let what = "membarrier";
    let wanted = membarrier_query().contains(rustix::thread::MembarrierQuery::GLOBAL_EXPEDITED);
    if wanted && membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok() {
        return Check::ok(what, "the kernel has it: messages pass without a fence");
    }
    let advice = "allow membarrier in the seccomp filter, or accept about a third less throughput";
    Check::degraded(what, "refused: each message costs a fence, and a waiting side polls each millisecond", advice)
}

fn memfd() -> Check {
    let what = "memfd and seals";
    let made = memfd_create("pelton-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL | SealFlags::FUTURE_WRITE;
    match made.and_then(|fd| fcntl_add_seals(&fd, seals).and_then(|()| fcntl_get_seals(&fd))) {
        Ok(found) if found.contains(seals) => Check::ok(what, "memory can be shared and sealed"),
        Ok(found) => Check::broken(what, format!("sealed with {found:?}, wanted {seals:?}"), "use Linux 5.10 or later"),
        Err(error) => Check::broken(what, error.to_string(), "allow memfd_create and fcntl in the seccomp filter"),
    }
}

fn observing() -> Check {
    let what = "observing";
    let Ok(own) = memfd_create("pelton-doctor", MemfdFlags::CLOEXEC) else {
        return Check::broken(what, "no memfd", "see above");
    };
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", own.as_raw_fd())).unwrap_or_default();
    match ["mnt_id:", "ino:"].iter().all(|field| info.lines().any(|line| line.starts_with(field))) {
        true => Check::ok(what, "ls, stat and top find the lanes of running processes"),
        false => Check::degraded(
            what,
            "/proc/PID/fdinfo has no inodes: ls, stat and top find path channels and listeners alone",
            "use Linux 5.14 or later",
        ),
    }
}

fn pidfd() -> Check {
    match pidfd_open(getpid(), PidfdFlags::empty()) {
        Ok(_) => Check::ok("pidfd", "the death of a peer is reported at once"),
        Err(error) => Check::degraded(
            "pidfd",
            error.to_string(),
            "allow pidfd_open in the seccomp filter: without it, a forked child of a dead peer can hide the death",
        ),
    }
}

fn io_uring() -> Check {
    let what = "io_uring";
    match pelton::file::Engine::new() {
        Ok(engine) if engine.uses_io_uring() => Check::ok(what, "files are read and written without threads"),
        Ok(_) => {
            let advice = "see /proc/sys/kernel/io_uring_disabled and the seccomp filter";
            Check::degraded(what, "refused: threads read and write files instead", advice)
        }
        Err(error) => Check::broken(what, error.to_string(), "raise the limits below"),
    }
}

fn descriptors() -> Check {
    let what = "descriptors";
    let limit = getrlimit(Resource::Nofile);
    let text = |limit: Option<u64>| limit.map_or("no limit".to_owned(), |limit| limit.to_string());
    let found = format!("limit {} (hard {}); an endpoint has 6 to 12", text(limit.current), text(limit.maximum));
    match limit.current {
        Some(..64) => Check::broken(what, found, "raise it: `ulimit -n 1024`, or LimitNOFILE= of the unit"),
        Some(..1024) => Check::degraded(what, found, "raise it for many channels: `ulimit -n`, or LimitNOFILE="),
        _ => Check::ok(what, found),
    }
}

fn file_size() -> Check {
    let what = "file size";
    match getrlimit(Resource::Fsize).current {
        None => Check::ok(what, "no limit"),
        Some(limit) => {
            let found = format!("limit {limit} bytes: no lane can be larger");
            let advice = "raise it: `ulimit -f unlimited`, or LimitFSIZE= of the unit";
            // The default capacity of a lane.
            match limit < 64 << 20 {
                true => Check::broken(what, found, advice),
                false => Check::degraded(what, found, advice),
            }
        }
    }
}

fn memory() -> Check {
    let what = "memory";
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = available.and_then(|text| text.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let group =
        control_group("memory.max", "memory", "memory.limit_in_bytes").and_then(|text| text.parse::<u64>().ok());
    let address = getrlimit(Resource::As).current;
    // Version 1 writes a huge number for none.
    let group = group.filter(|limit| *limit < 1 << 60);
    let least = [kib.map(|kib| kib * 1024), group, address].into_iter().flatten().min();
    let mut found = kib.map_or("unknown".to_owned(), |kib| format!("{} available", short_bytes(kib * 1024)));
    found += &group.map(|limit| format!(", control group limit {}", short_bytes(limit))).unwrap_or_default();
    found += &address.map(|limit| format!(", address space limit {}", short_bytes(limit))).unwrap_or_default();
    match least {
        Some(least) if least < 128 << 20 => {
            Check::degraded(what, found, "set smaller capacities (the default is 64 MiB a lane), or raise the limit")
        }
        _ => Check::ok(what, found),
    }
}

/// The first line of a file of this process's control group: of version 2, or of a controller of version 1.
fn control_group(file: &str, controller: &str, file_of_1: &str) -> Option<String> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path_of = |wanted: &str| {
        groups.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            controllers.split(',').any(|name| name == wanted).then(|| path.trim_start_matches('/').to_owned())
        })
    };
    let root = Path::new("/sys/fs/cgroup");
    // In a container the group's own path may be hidden, and the root is the group.
    let new =
        path_of("").and_then(|path| first_line(root.join(path).join(file)).or_else(|| first_line(root.join(file))));
    let old = || {
        let path = path_of(controller)?;
        let base = root.join(controller);
        first_line(base.join(path).join(file_of_1)).or_else(|| first_line(base.join(file_of_1)))
    };
    new.or_else(old)
}

fn runtime_directory() -> Check {
    let what = "runtime directory";
    let uid = geteuid().as_raw();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    let base = match &runtime {
        Some(runtime) => runtime.join("pelton"),
        None => std::env::temp_dir().join(format!("pelton-{uid}")),
    };
    let parent = base.parent().unwrap_or(Path::new("/"));
    let shown = base.display();
    match fs::symlink_metadata(&base) {
        Ok(found) if found.is_dir() && found.uid() == uid && found.mode() & 0o077 == 0 => {
            Check::ok(what, format!("{shown}, of uid {uid}, mode {:o}", found.mode() & 0o7777))
        }
        Ok(found) => {
            let kind = if found.is_dir() { "a directory" } else { "no directory" };
            let found = format!("{shown} is {kind} of uid {}, mode {:o}", found.uid(), found.mode() & 0o7777);
            Check::broken(what, found, format!("want a directory of uid {uid}, mode 700: `chmod 700` or remove it"))
        }
        Err(_) if rustix::fs::access(parent, rustix::fs::Access::WRITE_OK).is_ok() => {
            Check::ok(what, format!("{shown}, which the first listener makes"))
        }
        Err(error) => {
            let advice = format!("make {} writable, or set XDG_RUNTIME_DIR", parent.display());
            Check::broken(what, format!("{shown}: {error}"), advice)
        }
    }
}

fn status_field(name: &str) -> Option<String> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    status.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim().to_owned()))
}

fn seccomp() -> Check {
    match status_field("Seccomp").as_deref() {
        Some("0") | None => Check::ok("seccomp", "no filter"),
        Some(_) => Check::ok("seccomp", "a filter is active; the lines above say what it refuses"),
    }
}

fn container() -> Check {
    let marks = [("/.dockerenv", "docker"), ("/run/.containerenv", "podman")];
    let mark = marks.iter().find(|(file, _)| Path::new(file).exists()).map(|(_, name)| *name);
    let is_inner = status_field("NSpid").is_some_and(|pids| pids.split_whitespace().count() > 1);
    match mark {
        Some(name) => Check::ok(
            "container",
            format!("{name}: two containers reach each other by a shared directory (unix:PATH or path:DIR)"),
        ),
        None if is_inner => Check::ok("container", "a pid namespace of its own"),
        None => Check::ok("container", "none found"),
    }
}

fn processors() -> Check {
    let what = "processors";
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    let quota = control_group("cpu.max", "cpu", "cpu.cfs_quota_us").and_then(|text| {
        let mut words = text.split_whitespace();
        let quota: f64 = words.next()?.parse().ok()?;
        let period: f64 = words.next().and_then(|word| word.parse().ok()).unwrap_or(100_000.0);
        (quota > 0.0).then_some(quota / period)
    });
    let found = format!("{count} may be used{}", quota.map(|quota| format!(", quota {quota:.1}")).unwrap_or_default());
    let few = "both sides take turns on it: busy-polling is of no use, and a round trip costs two switches";
    match quota {
        _ if count == 1 => Check::degraded(what, found, few),
        Some(quota) if quota < 2.0 => {
            Check::degraded(what, found, "a side that busy-polls uses up the quota: wait with `block`, or raise it")
        }
        _ => Check::ok(what, found),
    }
}

fn clock() -> Check {
    let source = first_line("/sys/devices/system/clocksource/clocksource0/current_clocksource").unwrap_or_default();
    match source.as_str() {
        "hpet" | "acpi_pm" | "jiffies" | "refined-jiffies" => Check::degraded(
            "clock",
            source.clone(),
            "each reading is a system call of about a microsecond: see the kernel's log for why `tsc` is not used",
        ),
        source => Check::ok("clock", source),
    }
}

fn channel(name: &str, args: &DoctorArgs) -> Result<(), Failure> {
    let mut channels = named(&mut args.place.observer()?, name);
    if channels.is_empty() {
        return Err(no_channel(name));
    }
    let began = Instant::now();
    let before: Vec<Vec<Reading>> =
        channels.iter().map(|channel| channel.lanes.iter().map(|lane| lane.reading.clone()).collect()).collect();
    // Nothing to close: a signal ends the process.
    std::thread::sleep(INTERVAL);
    let mut problems = 0;
    let mut objects = Vec::new();
    for (channel, before) in channels.iter_mut().zip(&before) {
        for lane in &mut channel.lanes {
            lane.reading = lane.read().map_err(|error| Failure::System(format!("a lane of {name}: {error}")))?;
        }
        let found = diagnosis(channel, before, began.elapsed());
        problems += found.len();
        if args.json {
            objects.push(json!({
                "name": channel.name, "kind": channel.kind.word(), "state": channel.state().words(), "problems": found
            }));
            continue;
        }
        let header = format!("{} ({})", name_of(channel), channel.kind.word());
        match found.is_empty() {
            // It is not known whether one should be there: a sender of many that was killed has left no trace.
            true if channel.state() == State::Idle && channel.kind != Kind::Service => {
                let missing = match (channel.kind, is_absent(&channel.receiver)) {
                    (Kind::Listener, _) => "nobody is connected",
                    (Kind::Broadcast, true) if is_absent(&channel.lanes[0].sender) => "there is no publisher",
                    (Kind::Broadcast, true) => "there is no subscriber",
                    (_, true) => "there is no receiver",
                    (_, false) => "there is no sender",
                };
                print(format!("{header}: nothing waits, and {missing}: start one if there should be\n"))?;
            }
            true => print(format!("{header}: nothing is wrong\n"))?,
            false => print(found.iter().map(|problem| format!("{header}: {problem}\n")).collect::<String>())?,
        }
    }
    if args.json {
        print(json(&json!({ "channels": objects })))?;
    }
    match problems {
        0 => Ok(()),
        // The lines on standard output are the text.
        _ => Err(Failure::Peer(format!("{} with {name}", counted(problems as u64, "problem")))),
    }
}

fn is_absent(side: &Side) -> bool {
    matches!(side.activity, Activity::Absent | Activity::Closed)
}

/// What is wrong with a channel, in sentences.
fn diagnosis(channel: &Channel, before: &[Reading], time: Duration) -> Vec<String> {
    let mut found = Vec::new();
    let waiting = channel.waiting_messages();
    let waits = match waiting {
        0 => "no message waits".to_owned(),
        1 => "1 message waits".to_owned(),
        _ => format!("{} messages wait ({} bytes)", short(waiting), short_bytes(channel.waiting_bytes())),
    };
    let receiver = side(&channel.receiver);
    let since = |side: &pelton::observe::Side| {
        side.stopped_for.map(|time| format!(" for {}", short_time(time))).unwrap_or_default()
    };
    match channel.receiver.activity {
        Activity::Stopped => found.push(format!(
            "receiver {receiver} is stopped{}; {waits}: `kill -CONT {}` lets it go on",
            since(&channel.receiver),
            channel.receiver.pid
        )),
        Activity::Died => {
            found.push(format!("receiver {receiver} without closing; {waits}: start another one under the same name"));
        }
        Activity::Closed | Activity::Absent if waiting > 0 => found.push(match &channel.durable {
            None => format!("nobody reads; {waits}: start a receiver"),
            Some(name) => {
                let holds = channel.lanes.iter().any(|lane| lane.is_full());
                let holds = if holds { ", and it holds the publisher up" } else { "" };
                let (name, path) = (one_line(name), name_of(channel));
                let remove = format!("`pelton rm {path} --durable {name}` removes it");
                format!("no process uses the durable subscription {name}; {waits}{holds}: start it, or {remove}")
            }
        }),
        Activity::Unknown => found.push(format!("receiver {receiver} cannot be inspected: run this as root")),
        _ => {}
    }
    for lane in &channel.lanes {
        let (sender, number) = (side(&lane.sender), lane.number);
        match lane.sender.activity {
            Activity::Stopped => found.push(format!(
                "sender {sender} of lane {number} is stopped{}: `kill -CONT {}` lets it go on",
                since(&lane.sender),
                lane.sender.pid
            )),
            Activity::Died => {
                let waits = match lane.reading.waiting_messages {
                    0 => "no message of it waits".to_owned(),
                    1 => "1 message of it waits".to_owned(),
                    many => format!("{} messages of it wait", short(many)),
                };
                found.push(format!(
                    "sender {} of lane {number} died without closing; {waits}: start another one under the same name",
                    lane.sender.pid
                ));
            }
            _ => {}
        }
        let earlier = before.get(lane.number as usize);
        let grown = |of: fn(&Reading) -> u64| {
            let before = earlier.map_or(0, of);
            of(&lane.reading).saturating_sub(before) as f64 / time.as_secs_f64().max(1e-9)
        };
        let (sent, received) = (grown(|reading| reading.sent.messages), grown(|reading| reading.received.messages));
        let alive = lane.sender.activity == Activity::Alive;
        if lane.is_full() && alive {
            let pace = match channel.receiver.activity {
                Activity::Alive if received < 1.0 => format!(
                    "; receiver {} runs and takes none: `cat /proc/{}/wchan`, or a debugger, says what it waits for",
                    side(&channel.receiver),
                    channel.receiver.pid
                ),
                Activity::Alive => format!("; the receiver takes {} messages a second", short(received as u64)),
                _ => String::new(),
            };
            let full = percent_of(&lane.reading);
            found.push(format!("lane {number} is full ({full}%): sender {sender} waits for space{pace}"));
        } else if alive && sent > received && lane.reading.waiting_bytes > lane.reading.capacity / 8 {
            let mean = lane.reading.waiting_bytes as f64 / lane.reading.waiting_messages.max(1) as f64;
            let free = lane.reading.capacity.saturating_sub(lane.reading.waiting_bytes) as f64;
            let seconds = free / ((sent - received) * mean.max(1.0));
            found.push(format!(
                "lane {number} fills: {} messages a second come and {} go; its sender will block in about {}",
                short(sent as u64),
                short(received as u64),
                short_time(Duration::from_secs_f64(seconds.clamp(0.0, 1e9)))
            ));
        }
    }
    found.extend(channel.note.as_deref().map(one_line));
    debug_assert!(channel.state() != State::ReceiverStopped || !found.is_empty());
    found
}
