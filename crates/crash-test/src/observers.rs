//! Observers of the channels while their sides are killed: `pelton tail`, `top` and `ls`, which the test kills at
//! random moments too. They may change nothing, so the faults are those of the sides.

use super::message::{Random, mix};
use pelton_cli::failure::Failure;
use std::{
    fs::File,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread::JoinHandle,
    time::Duration,
};

/// The longest life of an observer: long enough to find the channels, on a busy machine too, and to tap them.
const LIFE_MAX: Duration = Duration::from_millis(400);

/// What the observers did.
#[derive(Clone, Copy, Debug, Default)]
pub struct Observed {
    /// Observers that were killed.
    pub kills: u64,
    /// Bytes that they printed about the channels.
    pub bytes: u64,
}

/// A thread that starts and kills them.
pub struct Observers {
    stop: Sender<()>,
    thread: JoinHandle<std::io::Result<Observed>>,
}

impl Observers {
    /// Starts observing the channels in `directory`; `output` is a file for what they print.
    pub fn start(program: &str, directory: &Path, output: PathBuf, seed: u64) -> Observers {
        let (program, directory) = (program.to_owned(), directory.to_owned());
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || observe(&program, &directory, &output, seed, &stopped));
        Observers { stop, thread }
    }

    /// Ends them.
    pub fn finish(self) -> Result<Observed, Failure> {
        drop(self.stop);
        let observed = self.thread.join().expect("the thread of observers does not panic");
        let observed = observed.map_err(|error| Failure::system("the program of --observers", error))?;
        match observed {
            // Each kind has had several lives.
            Observed { kills: 40.., bytes: 0 } => {
                Err(Failure::System(format!("{} observers printed nothing: is --observers the tool?", observed.kills)))
            }
            observed => Ok(observed),
        }
    }
}

fn observe(
    program: &str,
    directory: &Path,
    output: &Path,
    seed: u64,
    stopped: &Receiver<()>,
) -> std::io::Result<Observed> {
    let place = directory.to_str().unwrap_or_default();
    let (path, socket) = (format!("path:{place}/c"), format!("unix:{place}/s"));
    // `--load`: more of the processor than by default, so that an observer is at work when it is killed.
    let tail = |name| ["tail", name, "--json", "--since-start", "--load", "50", "--timeout", "60"].to_vec();
    let commands = [
        tail(&*path),
        tail(&*socket),
        vec!["top", "--json", "--interval", "0.05", "--root", place],
        vec!["ls", "--json", "--root", place],
    ];
    let mut random = Random::new(mix(seed));
    let mut observed = Observed::default();
    loop {
        for command in &commands {
            let printed = File::create(output)?;
            let mut observer = Observer(
                Command::new(program)
                    .args(command)
                    .stdin(Stdio::null())
                    .stdout(printed.try_clone()?)
                    .stderr(Stdio::null())
                    .spawn()?,
            );
            let life = Duration::from_micros(random.below(LIFE_MAX.as_micros() as u64));
            let is_over = stopped.recv_timeout(life) != Err(RecvTimeoutError::Timeout);
            observed.kills += u64::from(observer.kill()?);
            // `ls` and `top` print of other channels too.
            if command[0] == "tail" || std::fs::read_to_string(output)?.contains(place) {
                observed.bytes += printed.metadata()?.len();
            }
            if is_over {
                return Ok(observed);
            }
        }
    }
}

/// A process that is killed when it is dropped.
struct Observer(Child);

impl Observer {
    /// Returns whether it still ran.
    fn kill(&mut self) -> std::io::Result<bool> {
        let is_running = self.0.try_wait()?.is_none();
        self.0.kill()?;
        self.0.wait()?;
        Ok(is_running)
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}
