//! `pelton info`: the processes and the messages of a channel, read without a role in it.

use crate::{
    channel::directory,
    failure::Failure,
    observed::policy_words,
    output::{json, print},
    report::Counters,
};
use clap::Args;
use pelton::inspect::{self, BroadcastInfo, ChannelInfo, ListenerInfo, RoleInfo, SubscriptionInfo};
use serde::Serialize;
use std::path::PathBuf;

/// Options of `pelton info`.
#[derive(Args)]
pub struct InfoArgs {
    /// A channel's directory, DIR or path:DIR; or a short name or unix:PATH, to list its listeners
    name: String,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Runs `pelton info`.
pub fn run(args: &InfoArgs) -> Result<(), Failure> {
    // A short name has no slash. A directory without one can be written as ./DIR.
    let is_directory = args.name.starts_with("path:") || (args.name.contains('/') && !args.name.starts_with("unix:"));
    if is_directory {
        match inspect::broadcast(directory(&args.name)) {
            // A channel with a receiver, or none: the next call finds out.
            Err(pelton::Error::NotAChannel { .. }) => {}
            found => {
                let found = found?;
                return print(if args.json { json(&Broadcast::of(&found)) } else { text_of_broadcast(&found) });
            }
        }
        let found = inspect::info(directory(&args.name))?;
        return print(if args.json { json(&channel(&found)) } else { text_of(&found) });
    }
    let found = inspect::listeners(&args.name)?;
    if found.is_empty() {
        return Err(pelton::Error::NoListener { name: args.name.clone() }.into());
    }
    let line = |listener: &ListenerInfo| match listener.pid {
        Some(0) => format!("{}  process unknown, too busy to reply  alive\n", listener.path.display()),
        Some(pid) => format!("{}  process {pid}  alive\n", listener.path.display()),
        None => format!("{}  dead; the next listener replaces it\n", listener.path.display()),
    };
    print(if args.json { json(&listeners(&args.name, &found)) } else { found.iter().map(line).collect() })
}

fn role(name: &str, role: &RoleInfo) -> String {
    let state = match (role.generation, role.is_alive, role.is_closed) {
        (0, false, _) => return format!("{name}: none so far"),
        (_, true, _) => "alive",
        (_, false, true) => "closed",
        (_, false, false) => "dead",
    };
    format!("{name}: process {}, {state}, generation {}", role.pid, role.generation)
}

fn text_of(info: &ChannelInfo) -> String {
    let boot = if info.is_from_this_boot { "" } else { ", created before the last reboot: see `pelton recover`" };
    let mut text = format!(
        "{}: lanes of {} bytes, messages up to {}, window {}, {} of {} lanes, mode {:o}{boot}\nwire version {}, layout {:#018x}\n{}\n",
        info.path.display(),
        info.capacity,
        info.message_bytes_max,
        info.window,
        info.lanes.len(),
        info.lanes_max,
        info.mode,
        info.wire_version,
        info.layout_signature,
        role("receiver", &info.receiver),
    );
    for lane in &info.lanes {
        let (sent, received) = (&lane.sent, &lane.received);
        text += &format!("lane {}: {}\n", lane.number, role("sender", &lane.sender));
        text += &format!(
            "  {} messages wait, from number {}; {} bytes allocated\n",
            lane.depth, lane.head_seq, lane.allocated_bytes
        );
        text += &format!(
            "  sent {} messages, {} bytes; waited {}, slept {}, rang {} times; at most {} waited\n",
            sent.messages, sent.bytes, sent.waits, sent.sleeps, sent.wakes_sent, sent.depth_max
        );
        text += &format!(
            "  received {} messages, {} bytes; waited {}, slept {}, rang {} times\n",
            received.messages, received.bytes, received.waits, received.sleeps, received.wakes_sent
        );
    }
    text
}

fn text_of_broadcast(info: &BroadcastInfo) -> String {
    let boot = if info.is_from_this_boot { "" } else { ", created before the last reboot: it can only be removed" };
    let mut text = format!(
        "{}: broadcast of {} bytes, messages up to {}, mode {:o}{boot}\n{}\n  messages {} to {}; {} bytes allocated\n",
        info.path.display(),
        info.capacity,
        info.message_bytes_max,
        info.mode,
        role("publisher", &info.publisher),
        info.oldest,
        info.next - 1,
        info.allocated_bytes,
    );
    for one in &info.subscriptions {
        let name = one.durable.as_ref().map_or("subscriber".to_owned(), |name| format!("durable {name}"));
        let process = if one.is_alive { format!("process {}", one.pid) } else { "no process".to_owned() };
        text += &format!("{name}: {process}, {}, {} behind", policy(one), one.behind);
        text += &format!("; received {} messages, missed {}\n", one.received.messages, one.missed);
    }
    text
}

fn policy(subscription: &SubscriptionInfo) -> &'static str {
    policy_words(subscription.policy, subscription.lag_after)
}

#[derive(Serialize)]
struct Broadcast<'a> {
    path: &'a PathBuf,
    capacity: u64,
    message_bytes_max: u64,
    mode: String,
    is_from_this_boot: bool,
    publisher: Role,
    oldest: u64,
    next: u64,
    allocated_bytes: u64,
    sent: Counters,
    subscriptions: Vec<SubscriptionReport<'a>>,
}

#[derive(Serialize)]
struct SubscriptionReport<'a> {
    durable: Option<&'a str>,
    is_alive: bool,
    pid: u32,
    policy: &'static str,
    lag_after_seconds: Option<f64>,
    behind: u64,
    received: Counters,
    missed: u64,
}

impl Broadcast<'_> {
    fn of(info: &BroadcastInfo) -> Broadcast<'_> {
        let subscription = |one| -> SubscriptionReport<'_> {
            let one: &SubscriptionInfo = one;
            SubscriptionReport {
                durable: one.durable.as_deref(),
                is_alive: one.is_alive,
                pid: one.pid,
                policy: policy(one),
                lag_after_seconds: one.lag_after.map(|time| time.as_secs_f64()),
                behind: one.behind,
                received: one.received.into(),
                missed: one.missed,
            }
        };
        Broadcast {
            path: &info.path,
            capacity: info.capacity,
            message_bytes_max: info.message_bytes_max,
            mode: format!("{:o}", info.mode),
            is_from_this_boot: info.is_from_this_boot,
            publisher: role_of(&info.publisher),
            oldest: info.oldest,
            next: info.next,
            allocated_bytes: info.allocated_bytes,
            sent: info.sent.into(),
            subscriptions: info.subscriptions.iter().map(subscription).collect(),
        }
    }
}

#[derive(Serialize)]
struct Channel<'a> {
    path: &'a PathBuf,
    capacity: u64,
    message_bytes_max: u64,
    window: u64,
    mode: String,
    lanes_max: u32,
    is_from_this_boot: bool,
    wire_version: u32,
    layout_signature: String,
    receiver: Role,
    lanes: Vec<Lane>,
}

#[derive(Serialize)]
struct Role {
    is_alive: bool,
    pid: u32,
    generation: u64,
    is_closed: bool,
}

#[derive(Serialize)]
struct Lane {
    number: u32,
    sender: Role,
    depth: u64,
    head_seq: u32,
    tail_seq: u32,
    allocated_bytes: u64,
    sent: Counters,
    received: Counters,
}

fn role_of(role: &RoleInfo) -> Role {
    let RoleInfo { is_alive, pid, generation, is_closed, .. } = *role;
    Role { is_alive, pid, generation, is_closed }
}

fn channel(info: &ChannelInfo) -> Channel<'_> {
    Channel {
        path: &info.path,
        capacity: info.capacity,
        message_bytes_max: info.message_bytes_max,
        window: info.window,
        mode: format!("{:o}", info.mode),
        lanes_max: info.lanes_max,
        is_from_this_boot: info.is_from_this_boot,
        wire_version: info.wire_version,
        layout_signature: format!("{:#018x}", info.layout_signature),
        receiver: role_of(&info.receiver),
        lanes: (info.lanes.iter())
            .map(|lane| Lane {
                number: lane.number,
                sender: role_of(&lane.sender),
                depth: lane.depth,
                head_seq: lane.head_seq,
                tail_seq: lane.tail_seq,
                allocated_bytes: lane.allocated_bytes,
                sent: lane.sent.into(),
                received: lane.received.into(),
            })
            .collect(),
    }
}

fn listeners(name: &str, found: &[ListenerInfo]) -> serde_json::Value {
    let each = found.iter().map(|listener| serde_json::json!({ "path": listener.path, "pid": listener.pid }));
    serde_json::json!({ "name": name, "listeners": each.collect::<Vec<_>>() })
}
