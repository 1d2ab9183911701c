//! Calls from an nginx worker, in Lua: by pelton's module, and by cosockets with a 4-byte length to the services of
//! pelton and of a stream socket. This side starts the worker, has it make each pass by one HTTP request, and measures
//! the worker, not itself.

use std::{
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use super::{PeltonServing, SockServing, SockStreamService};
use crate::{
    compiled,
    endpoints::CONNECT,
    measure::{CallCounter, Usage, now_ns},
    parameters::{Job, Pass, Role},
    payload::WARM_UP,
    side::{PassReport, passes},
    workloads::call::{is_simple, serve_warmed_up},
};

const CONFIGURATION: &str = include_str!("../../../nginx/nginx.conf");
const CALLS: &str = include_str!("../../../nginx/calls.lua");
/// The binding's Lua, all of it.
const BINDING: [(&str, &str); 4] = [
    ("resty/pelton.lua", include_str!("../../../../bindings/nginx/lib/resty/pelton.lua")),
    ("resty/pelton/abi.lua", include_str!("../../../../bindings/nginx/lib/resty/pelton/abi.lua")),
    ("resty/pelton/base.lua", include_str!("../../../../bindings/nginx/lib/resty/pelton/base.lua")),
    ("resty/pelton/file.lua", include_str!("../../../../bindings/nginx/lib/resty/pelton/file.lua")),
];

/// One side's part, by pelton.
pub fn pelton(job: &Job) -> Result<()> {
    match job.role {
        Role::Service => serve_warmed_up(job, PeltonServing::new(job)?, warm_up(job)),
        _ => measured(job),
    }
}

/// One side's part, by cosockets. Each coroutine has a connection of its own.
pub fn cosocket(job: &Job) -> Result<()> {
    match job.role {
        Role::Service if is_simple(job) => serve_warmed_up(job, SockServing::new(job)?, warm_up(job)),
        Role::Service => {
            let connections = Job { senders: job.calls.in_flight, ..job.clone() };
            serve_warmed_up(job, SockStreamService::new(&connections)?, warm_up(job))
        }
        _ => measured(job),
    }
}

/// Makes this client's passes.
fn measured(job: &Job) -> Result<()> {
    ensure!(job.senders == 1 && job.idle == 0, "nginx is one client: leave out --clients and --beside-flood");
    ensure!(
        job.sizes.is_fixed() && job.sizes.max > 0 && job.delay_us == 0 && job.calls.rate.is_none(),
        "nginx makes calls of one size above 0, as fast as they go: leave out --delay and --rate"
    );
    let nginx = Nginx::start(job)?;
    nginx.make(warm_up(job))?;
    passes(job, |pass| nginx.pass(pass))
}

/// Calls before the first pass.
fn warm_up(job: &Job) -> u64 {
    WARM_UP * job.calls.in_flight as u64
}

/// A worker that listens for HTTP at a Unix socket. It does not outlive this value.
struct Nginx<'a> {
    child: Child,
    job: &'a Job,
}

impl Nginx<'_> {
    fn start(job: &Job) -> Result<Nginx<'_>> {
        let module = module()?;
        let fill = |text: &str| {
            let directory = job.directory.display().to_string();
            text.replace("DIRECTORY", &directory).replace("MODULE", &module.display().to_string())
        };
        fs::create_dir_all(job.directory.join("resty/pelton")).context("making a directory for Lua")?;
        let own = [("nginx.conf", CONFIGURATION), ("calls.lua", CALLS)].map(|(name, text)| (name, fill(text)));
        for (name, text) in own.into_iter().chain(BINDING.map(|(name, text)| (name, text.to_string()))) {
            fs::write(job.directory.join(name), text).with_context(|| format!("writing {name}"))?;
        }
        // The service may not listen yet.
        let service = job.directory.join(if job.system == "pelton-nginx" { "service" } else { "socket" });
        let deadline = Instant::now() + CONNECT;
        while !service.exists() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        let child = Command::new("nginx")
            .arg("-p")
            .arg(&job.directory)
            .arg("-c")
            .arg(job.directory.join("nginx.conf"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn()
            .context("starting nginx: `./run bench` installs it where systems of nginx are named")?;
        Ok(Nginx { child, job })
    }

    /// One HTTP request, which makes so many calls.
    fn make(&self, count: u64) -> Result<()> {
        let Job { calls, sizes, system, .. } = self.job;
        let system = if system == "pelton-nginx" { "pelton" } else { "cosocket" };
        let mut socket = self.connect()?;
        write!(
            socket,
            "GET /?system={system}&count={count}&in_flight={}&size={} HTTP/1.0\r\n\r\n",
            calls.in_flight, sizes.max
        )?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer).context("reading nginx's answer")?;
        match answer.split_once("\r\n\r\n") {
            Some((_, "done")) => Ok(()),
            found => {
                let log = fs::read_to_string(self.job.directory.join("error.log")).unwrap_or_default();
                bail!("nginx answered {:?}; its log says: {log}", found.map_or(answer.as_str(), |(_, body)| body))
            }
        }
    }

    /// Connects, once the worker listens.
    fn connect(&self) -> Result<UnixStream> {
        let path = self.job.directory.join("http");
        let deadline = Instant::now() + CONNECT;
        loop {
            match UnixStream::connect(&path) {
                Ok(socket) => return Ok(socket),
                Err(error) if Instant::now() > deadline => return Err(error).context("connecting to nginx"),
                Err(_) => thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    fn pass(&self, pass: &Pass) -> Result<PassReport> {
        let pid = self.child.id();
        let counter = if pass.count_calls { Some(CallCounter::of_processes(&[pid])?) } else { None };
        let usage = Usage::of_process(pid)?;
        let start_ns = now_ns();
        self.make(pass.count)?;
        let end_ns = now_ns();
        let usage = Usage::of_process(pid)?.since(usage);
        let calls = counter.map(CallCounter::stop).transpose()?;
        let bytes = pass.count * self.job.sizes.max as u64;
        Ok(PassReport { start_ns, end_ns, usage, calls, bytes, ..PassReport::default() })
    }
}

impl Drop for Nginx<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `./run bench` builds it beside this program.
fn module() -> Result<PathBuf> {
    let module = compiled::directory()?.join("ngx_pelton_module.so");
    ensure!(
        module.exists(),
        "{} is not there: `./run bench` makes it where systems of nginx are named",
        module.display()
    );
    Ok(module)
}
