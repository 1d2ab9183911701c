//! A server of NATS, and processes that end with the test.

#![allow(dead_code)] // each of the two programs uses a part

use std::{
    io::{BufRead as _, BufReader},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// A wait of a test that takes so long has failed.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// The server's program: PELTON_NATS_SERVER, or `nats-server` on the PATH. `None`, with a message: there is none, and
/// PELTON_CI does not demand it.
pub fn server_program() -> Option<PathBuf> {
    let named = std::env::var_os("PELTON_NATS_SERVER").map(PathBuf::from);
    let found = named.or_else(|| {
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path).map(|directory| directory.join("nats-server")).find(|program| program.exists())
    });
    if found.is_none() {
        assert!(std::env::var_os("PELTON_CI").is_none(), "there is no nats-server: `./run verify bridge` installs it");
        eprintln!("SKIPPED: there is no nats-server; `./run verify bridge` installs it");
    }
    found
}

/// A port that nothing listens on.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port").port()
}

/// A process that is killed when this is dropped. Its standard error is kept.
pub struct Running {
    pub name: &'static str,
    child: Child,
    errors: Arc<Mutex<String>>,
    reading: Option<JoinHandle<()>>,
}

impl Running {
    pub fn start(name: &'static str, command: &mut Command) -> Running {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("starting {name}: {error}"));
        let errors = Arc::new(Mutex::new(String::new()));
        let (stderr, kept) = (child.stderr.take().expect("piped"), errors.clone());
        let reading = std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let mut kept = kept.lock().unwrap();
                kept.push_str(&line);
                kept.push('\n');
            }
        });
        Running { name, child, errors, reading: Some(reading) }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        // It may have ended.
        let _ = rustix::process::kill_process(pid, signal);
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// What it has written to standard error so far.
    pub fn errors(&self) -> String {
        self.errors.lock().unwrap().clone()
    }

    pub fn has_ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("waiting for a child")
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> (Option<i32>, String) {
        let mut ended = None;
        eventually(&format!("the end of {}", self.name), || {
            ended = self.has_ended();
            ended.is_some()
        });
        // The rest of standard error.
        let _ = self.reading.take().expect("waited for once").join();
        (ended.and_then(|status| status.code()), self.errors())
    }

    /// Waits until standard error has `text`.
    pub fn says(&self, text: &str) {
        eventually(&format!("{} to say {text:?}, it says {:?}", self.name, self.errors()), || {
            self.errors().contains(text)
        });
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("--- {}:\n{}", self.name, self.errors());
        }
    }
}

/// Waits until `condition` is true.
#[track_caller]
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited {DEADLINE:?} for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A server with JetStream, its files in a directory.
pub struct Server {
    program: PathBuf,
    directory: PathBuf,
    pub port: u16,
    pub options: Vec<String>,
    pub process: Running,
}

impl Server {
    pub fn start(program: &Path, directory: &Path, options: &[&str]) -> Server {
        let port = free_port();
        let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
        let process = Server::process(program, directory, port, &options);
        let server = Server { program: program.to_owned(), directory: directory.to_owned(), port, options, process };
        server.wait_until_up();
        server
    }

    fn process(program: &Path, directory: &Path, port: u16, options: &[String]) -> Running {
        let config = directory.join("server.conf");
        std::fs::create_dir_all(directory).expect("a directory for the server");
        let text = format!(
            "listen: 127.0.0.1:{port}\nmax_payload: 65536\njetstream {{ store_dir: store }}\n{}\n",
            options.join("\n")
        );
        std::fs::write(&config, text).expect("the server's configuration");
        Running::start("nats-server", Command::new(program).arg("-c").arg(config).current_dir(directory))
    }

    /// Starts it again after [`Running::kill`], on the same port.
    pub fn start_again(&mut self) {
        self.process = Server::process(&self.program, &self.directory, self.port, &self.options);
    }

    pub fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }

    pub fn url(&self) -> String {
        format!("nats://{}", self.address())
    }

    pub fn wait_until_up(&self) {
        eventually("the server", || TcpStream::connect(self.address()).is_ok());
    }
}

/// The bridge's command line.
pub fn bridge(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pelton-bridge"));
    command.args(arguments);
    command
}
