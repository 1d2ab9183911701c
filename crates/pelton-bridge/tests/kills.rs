//! The crash test of the bridge: messages go from a sender through a channel, a bridge, a server, a bridge and a
//! channel to a receiver, while a driver kills and stops any of these at random moments, and a proxy drops, delays,
//! doubles and interrupts the connections. With --replicas, three servers have the stream, and proxies between them cut
//! one off. The accounts: message number N of the second channel must be message N of the first. So none is lost, none
//! comes twice, none out of order.
//!
//!     cargo test -p pelton-bridge --test kills -- [--kills N] [--seed N] [--packed] [--replicas]

mod support;

use pelton::{Deadline, Options};
use pelton_testkit::Random;
use rustix::process::Signal;
use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    os::unix::{fs::FileExt as _, process::ExitStatusExt as _},
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};
use support::{Running, Server, bridge, eventually, free_port, server_program};

/// Small, so that the bridge and the sender wait for space; the largest message is a third of it.
const CAPACITY: u64 = 1 << 20;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["sender", directory, stop] => sender(Path::new(directory), Path::new(stop)),
        ["receiver", directory, progress] => receiver(Path::new(directory), Path::new(progress)),
        _ => return drive(&words),
    }
    ExitCode::SUCCESS
}

/// Message `number`: its number, and bytes derived from it. Most are short; some are larger than the server's limit.
fn message(number: u64, is_last: bool, into: &mut Vec<u8>) {
    into.clear();
    into.extend(number.to_le_bytes());
    into.push(u8::from(is_last));
    let mut random = Random::new(number);
    let bytes = match random.below(1000) {
        0..2 => 70_000 + random.below(200_000),
        2..50 => random.below(8_000),
        _ => random.below(400),
    };
    while (into.len() as u64) < 9 + bytes {
        into.extend(random.word().to_le_bytes());
    }
}

/// Sends messages until `stop` exists. After a kill, the channel's next number says where to go on.
fn sender(directory: &Path, stop: &Path) {
    let mut sender = Options::new().capacity(CAPACITY).create_sender(directory).expect("the channel");
    let mut bytes = Vec::new();
    loop {
        let number = u64::from(sender.next_seq());
        let is_last = stop.exists();
        message(number, is_last, &mut bytes);
        while let Err(error) = sender.send(&bytes) {
            assert!(error.is_closed() || error.is_peer_died(), "{error}");
            // Needs no receiver.
            sender.resume_until(Instant::now()).expect("to go on");
        }
        if is_last {
            return;
        }
        // About 20,000 messages a second at most: the test is about kills.
        if number.is_multiple_of(20) {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Checks every message, and writes the number of the last one to `progress`; ends with the last message.
fn receiver(directory: &Path, progress: &Path) {
    let progress = std::fs::File::create(progress).expect("the journal");
    let mut receiver = Options::new().capacity(CAPACITY).create_receiver(directory).expect("the channel");
    let mut wanted = Vec::new();
    let mut last = None;
    loop {
        // Without a borrow, because `resume` needs the receiver.
        if let Err(error) = receiver.find_record(Deadline::Never) {
            assert!(error.is_closed() || error.is_peer_died(), "{error}");
            receiver.resume().expect("to go on");
            continue;
        }
        let message = receiver.receive().expect("the message that was found");
        let number = u64::from(message.seq());
        assert!(last.is_none_or(|last| number == last + 1), "the channel gives {number} after {last:?}");
        last = Some(number);
        let is_last = message.get(8) == Some(&1);
        self::message(number, is_last, &mut wanted);
        if *message != *wanted {
            let found = message.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes));
            eprintln!("FAULT: message {number} of the second channel is message {found:?} of the first, or damaged");
            std::process::exit(9);
        }
        progress.write_all_at(&number.to_le_bytes(), 0).expect("the journal");
        if is_last {
            return;
        }
    }
}

/// A proxy between a bridge and a server, or two servers: it can cut, delay, double and hold what passes.
struct Proxy {
    port: u16,
    state: Arc<ProxyState>,
}

#[derive(Default)]
struct ProxyState {
    delay_ms: AtomicU64,
    is_held: AtomicBool,
    is_refusing: AtomicBool,
    /// New connections are made twice: the server has each message of the client from two.
    is_doubling: AtomicBool,
    open: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    fn start(server: SocketAddr) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port for the proxy");
        let port = listener.local_addr().expect("its address").port();
        let state = Arc::new(ProxyState::default());
        let shared = state.clone();
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if shared.is_refusing.load(SeqCst) {
                    continue;
                }
                let Ok(server) = TcpStream::connect(server) else { continue };
                let _ = (client.set_nodelay(true), server.set_nodelay(true));
                let clone = |socket: &TcpStream| socket.try_clone().expect("a socket");
                let mut servers = vec![clone(&server)];
                if shared.is_doubling.load(SeqCst)
                    && let Ok(double) = TcpStream::connect(server.peer_addr().expect("connected"))
                {
                    servers.push(clone(&double));
                    // What it says goes nowhere.
                    let (from, state) = (clone(&double), shared.clone());
                    thread::spawn(move || pass(from, &mut [], &state));
                    keep(&shared, [double]);
                }
                for (from, mut to) in [(clone(&client), servers), (clone(&server), vec![clone(&client)])] {
                    let shared = shared.clone();
                    thread::spawn(move || pass(from, &mut to, &shared));
                }
                keep(&shared, [client, server]);
            }
        });
        Proxy { port, state }
    }

    /// Ends all connections.
    fn cut(&self) {
        for socket in self.state.open.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// Remembers open sockets, for [`Proxy::cut`].
fn keep<const N: usize>(state: &ProxyState, sockets: [TcpStream; N]) {
    let mut open = state.open.lock().unwrap();
    open.retain(|socket| socket.peer_addr().is_ok());
    open.extend(sockets);
}

fn pass(mut from: TcpStream, to: &mut [TcpStream], state: &ProxyState) {
    let mut bytes = vec![0; 16 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        thread::sleep(Duration::from_millis(state.delay_ms.load(SeqCst)));
        while state.is_held.load(SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
        if to.iter_mut().any(|to| to.write_all(&bytes[..count]).is_err()) {
            break;
        }
    }
    for socket in to.iter().chain([&from]) {
        let _ = socket.shutdown(Shutdown::Both);
    }
}

/// Everything that can be killed, in this order.
struct World {
    here: PathBuf,
    /// One, or three replicas.
    servers: Vec<Server>,
    /// Of each bridge, one to each server.
    proxies: [Vec<Proxy>; 2],
    /// From a server to another one.
    routes: Vec<(usize, usize, Proxy)>,
    packed: bool,
    processes: [Option<Running>; 4],
    random: Random,
    /// How often a bridge has died at a failpoint.
    deaths: u64,
}

const NAMES: [&str; 4] = ["sender", "out", "in", "receiver"];

impl World {
    fn start(&mut self, index: usize) {
        let path = |name: &str| self.here.join(name).display().to_string();
        let channel = |name: &str| format!("path:{}", path(name));
        let url = |index: usize| {
            let urls: Vec<String> =
                self.proxies[index].iter().map(|proxy| format!("nats://127.0.0.1:{}", proxy.port)).collect();
            urls.join(",")
        };
        let replicas = self.servers.len().to_string();
        let stream = ["--stream", "KILLS", "--create", "--require-replicas", &replicas];
        let own = |arguments: &[&str]| {
            let mut command = Command::new(std::env::current_exe().expect("this program"));
            command.args(arguments);
            command
        };
        let mut command = match index {
            0 => own(&["sender", &path("first"), &path("stop")]),
            1 => {
                let (channel, url) = (channel("first"), url(0));
                let mut words = vec!["out", &channel, "--nats", &url, "--subject", "kills.all"];
                words.extend(stream);
                words.extend(self.packed.then_some("--packed"));
                bridge(&words)
            }
            2 => bridge(&[&["in", "kills.*", &channel("second"), "--nats", &url(1)], &stream[..]].concat()),
            _ => own(&["receiver", &path("second"), &path("progress")]),
        };
        if matches!(index, 1 | 2) {
            // Steps that random kills do not meet.
            let name = match index {
                1 => ["stored", "unreleased"][self.random.below(2) as usize],
                _ => ["noted", "committed"][self.random.below(2) as usize],
            };
            command.env("PELTON_BRIDGE_DIE_AT", format!("{name}:{}", 1 + self.random.below(300)));
        }
        self.processes[index] = Some(Running::start(NAMES[index], &mut command));
    }

    fn progress(&self) -> u64 {
        let bytes = std::fs::read(self.here.join("progress")).unwrap_or_default();
        bytes.first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }

    /// Fails if a process has ended by itself: the sender and the receiver at the very end may.
    fn check(&mut self, may_end: bool) {
        let mut died = Vec::new();
        for (index, process) in self.processes.iter_mut().enumerate() {
            let Some(running) = process else { continue };
            let Some(status) = running.has_ended() else { continue };
            if matches!(index, 1 | 2) && status.signal() == Some(Signal::ABORT.as_raw()) {
                died.push(index);
                continue;
            }
            if !may_end || !matches!(index, 0 | 3) || !status.success() {
                let errors = running.wait().1;
                panic!("{} has ended by itself, {status}: {errors}", running.name);
            }
        }
        self.deaths += died.len() as u64;
        died.into_iter().for_each(|index| self.start(index));
    }

    /// One fault, and its end.
    fn disturb(&mut self, random: &mut Random) -> &'static str {
        let pause = |random: &mut Random, most| thread::sleep(Duration::from_millis(random.below(most)));
        let (bridge, server) = (random.below(2) as usize, random.below(self.servers.len() as u64) as usize);
        match random.below(13) {
            fault @ 0..3 if fault < 2 || self.servers.len() == 1 => {
                let server = &mut self.servers[server];
                server.process.kill();
                pause(random, 300);
                server.start_again();
                server.wait_until_up();
                "server killed"
            }
            0..3 => {
                // One is cut off from the others, perhaps the leader; the bridges reach it.
                let routes = || self.routes.iter().filter(|(from, to, _)| *from == server || *to == server);
                routes().for_each(|(_, _, proxy)| proxy.state.is_held.store(true, SeqCst));
                pause(random, 8000);
                routes().for_each(|(_, _, proxy)| proxy.cut());
                routes().for_each(|(_, _, proxy)| proxy.state.is_held.store(false, SeqCst));
                "one server cut off"
            }
            victim @ 3..7 => {
                let index = victim as usize - 3;
                self.processes[index].as_mut().expect("it runs").kill();
                pause(random, 200);
                self.start(index);
                ["sender killed", "out killed", "in killed", "receiver killed"][index]
            }
            7 => {
                // Both bridges, and all servers between them.
                for index in [1, 2] {
                    self.processes[index].as_mut().expect("it runs").kill();
                }
                self.servers.iter_mut().for_each(|server| server.process.kill());
                self.servers.iter_mut().for_each(Server::start_again);
                self.servers.iter().for_each(Server::wait_until_up);
                self.start(1);
                self.start(2);
                "both bridges and all servers killed"
            }
            8 => {
                let index = random.below(5) as usize;
                let victim = match index {
                    4 => &self.servers[server].process,
                    index => self.processes[index].as_ref().expect("it runs"),
                };
                victim.signal(Signal::STOP);
                pause(random, 1500);
                victim.signal(Signal::CONT);
                "stopped for a while"
            }
            9 => {
                self.proxies[bridge].iter().for_each(Proxy::cut);
                "connections cut"
            }
            10 => {
                let proxies = &self.proxies[bridge];
                let set = |of: fn(&ProxyState) -> &AtomicBool, value| {
                    proxies.iter().for_each(|proxy| of(&proxy.state).store(value, SeqCst));
                };
                set(|state| &state.is_held, true);
                pause(random, 1500);
                set(|state| &state.is_refusing, random.below(2) == 0);
                proxies.iter().for_each(Proxy::cut);
                pause(random, 500);
                set(|state| &state.is_refusing, false);
                set(|state| &state.is_held, false);
                "partition"
            }
            11 => {
                let proxies = &self.proxies[bridge];
                let set = |value| {
                    proxies.iter().for_each(|proxy| proxy.state.is_doubling.store(value, SeqCst));
                    proxies.iter().for_each(Proxy::cut);
                };
                set(true);
                pause(random, 1500);
                set(false);
                "connections doubled"
            }
            _ => {
                let proxies = &self.proxies[bridge];
                let delay = |value| {
                    proxies.iter().for_each(|proxy| proxy.state.delay_ms.store(value, SeqCst));
                };
                delay(random.below(30));
                pause(random, 500);
                // In the middle of the delay, so that a late original meets its repetition.
                self.processes[1].as_mut().expect("it runs").kill();
                self.start(1);
                pause(random, 300);
                self.proxies[bridge].iter().for_each(|proxy| proxy.state.delay_ms.store(0, SeqCst));
                "slow network, out killed"
            }
        }
    }
}

/// One server, or three whose routes go through proxies.
fn start_servers(program: &Path, here: &Path, count: usize) -> (Vec<Server>, Vec<(usize, usize, Proxy)>) {
    if count == 1 {
        return (vec![Server::start(program, &here.join("nats"), &[])], Vec::new());
    }
    let ports: Vec<u16> = (0..count).map(|_| free_port()).collect();
    let mut routes = Vec::new();
    for from in 0..count {
        for to in (0..count).filter(|to| *to != from) {
            routes.push((from, to, Proxy::start(SocketAddr::from(([127, 0, 0, 1], ports[to])))));
        }
    }
    let servers = (0..count).map(|index| {
        let urls: Vec<String> = routes
            .iter()
            .filter(|(from, _, _)| *from == index)
            .map(|(_, _, proxy)| format!("\"nats://127.0.0.1:{}\"", proxy.port))
            .collect();
        // What a server advertises is where nobody listens: others reach it through the proxies alone.
        let cluster = format!(
            "cluster {{ name: kills, listen: \"127.0.0.1:{}\", advertise: \"127.0.0.1:1\", no_advertise: true, routes: [ {} ] }}",
            ports[index],
            urls.join(", ")
        );
        let name = format!("server_name: server{index}");
        Server::start(program, &here.join(format!("nats{index}")), &[&name, &cluster])
    });
    (servers.collect(), routes)
}

fn drive(words: &[&str]) -> ExitCode {
    let (mut kills, mut seed, mut packed, mut count) = (4, std::process::id() as u64 ^ 0x5eed, false, 1);
    let mut words = words.iter();
    while let Some(&word) = words.next() {
        let mut number = || words.next().and_then(|word| word.parse().ok()).expect("a number");
        match word {
            "--kills" => kills = number(),
            "--seed" => seed = number(),
            "--packed" => packed = true,
            "--replicas" => count = 3,
            // Of cargo test.
            _ => {}
        }
    }
    let Some(program) = server_program() else { return ExitCode::SUCCESS };
    println!("bridge: {kills} faults, seed {seed}, {count} servers{}", if packed { ", packed" } else { "" });
    let here = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let (servers, routes) = start_servers(&program, here.path(), count);
    let proxies = [0; 2].map(|_| servers.iter().map(|server| Proxy::start(server.address())).collect());
    let mut world = World {
        here: here.path().to_owned(),
        servers,
        proxies,
        routes,
        packed,
        processes: [const { None }; 4],
        random: Random::new(!seed),
        deaths: 0,
    };
    let mut random = Random::new(seed);
    (0..4).for_each(|index| world.start(index));
    let began = Instant::now();
    for kill in 1..=kills {
        // Between two faults messages arrive, some of them at least.
        let before = world.progress();
        eventually("messages to arrive", || {
            world.check(false);
            world.progress() > before
        });
        thread::sleep(Duration::from_millis(random.below(300)));
        let what = world.disturb(&mut random);
        println!("{kill:4} {:7.1} s  message {:9}  {what}", began.elapsed().as_secs_f64(), world.progress());
    }
    std::fs::write(here.path().join("stop"), "").expect("the end");
    let mut receiver_ended = false;
    eventually("the last message", || {
        world.check(true);
        receiver_ended = world.processes[3].as_mut().is_none_or(|receiver| receiver.has_ended().is_some());
        receiver_ended
    });
    println!(
        "bridge: {kills} faults and {} deaths at failpoints in {:.1} s, {} messages: 0 lost, 0 twice, 0 out of order",
        world.deaths,
        began.elapsed().as_secs_f64(),
        world.progress()
    );
    ExitCode::SUCCESS
}
