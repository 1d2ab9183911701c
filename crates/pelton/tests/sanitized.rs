//! For sanitizers: a channel between threads, calls that a service's loop answers alternately with another thread,
//! and a pool. The pool's threads wait for a client and detect cancels. It has no test harness, since ThreadSanitizer
//! reports false races in it. `verify/run tools` runs it under sanitizers. `PELTON_ROUNDS` prolongs it.
//!
//! ThreadSanitizer does not understand fences. Between threads of a process with membarrier there is none on the fast
//! path.

use pelton::{Client, Options, Outcome, Request, Responder, Service};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

fn main() {
    let rounds: u64 = std::env::var("PELTON_ROUNDS").map_or(20_000, |text| text.parse().unwrap());
    messages(rounds);
    calls(rounds);
    streams(rounds / 100);
}

fn messages(rounds: u64) {
    let (mut sender, mut receiver) = Options::new().capacity(4096).threads().unwrap();
    let size = |number: u64| (number * 31 % 700) as usize;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut bytes = Vec::new();
            for number in 0..rounds {
                bytes.clear();
                bytes.resize(size(number), number as u8);
                sender.send(&bytes).unwrap();
            }
            assert!(
                sender.wait_released_until(std::time::Instant::now() + std::time::Duration::from_secs(60)).unwrap()
            );
            sender.close().unwrap();
        });
        let mut buffer = Vec::new();
        for number in 0..rounds {
            // Alternately in place, copied, and in batches of one.
            if number % 2 == 0 {
                let message = receiver.receive().unwrap();
                assert_eq!(message.len(), size(number));
                assert!(message.iter().all(|byte| *byte == number as u8));
            } else {
                let bytes = receiver.receive_into(&mut buffer).unwrap();
                assert_eq!(bytes, size(number));
                assert!(buffer.iter().all(|byte| *byte == number as u8));
            }
        }
        assert!(receiver.receive().unwrap_err().is_closed());
    });
    println!("{rounds} messages");
}

/// Without the lock while there is no responder, with it while the other thread has one.
fn calls(rounds: u64) {
    let dir = tempfile::tempdir().unwrap();
    let name = format!("unix:{}/calls", dir.path().display());
    let mut service = Service::listen(&name).unwrap();
    let (given, is_over) = (Mutex::new(None::<(Responder, Vec<u8>)>), AtomicBool::new(false));
    // By `try_recv`, since ThreadSanitizer does not see a thread's waits inside the standard library.
    let given = || loop {
        match given.try_lock() {
            Ok(given) => return given,
            Err(_) => std::thread::yield_now(),
        }
    };
    std::thread::scope(|scope| {
        let answering = scope.spawn(|| {
            loop {
                let taken = given().take();
                match taken {
                    Some((responder, bytes)) => responder.reply(&bytes).unwrap(),
                    None if is_over.load(Ordering::Acquire) => return,
                    None => std::thread::yield_now(),
                }
            }
        });
        let asking = scope.spawn(|| ask(&name, rounds));
        for number in 0..rounds {
            let mut request = service.receive().unwrap();
            // Rarely, since this lock also synchronises with the other thread.
            if number % 8 == 0 && given().is_none() {
                let (bytes, responder) = request.into_parts();
                *given() = Some((responder, bytes));
            } else if number % 2 == 0 {
                reply_by_reservation(&mut request);
            } else {
                let bytes = request.to_vec();
                request.reply(&bytes).unwrap();
            }
        }
        is_over.store(true, Ordering::Release);
        asking.join().unwrap();
        // Joined visibly; ThreadSanitizer does not see the end of the scope.
        answering.join().unwrap();
    });
    println!("{rounds} calls");
}

fn reply_by_reservation(request: &mut Request<'_>) {
    let (bytes, responder) = request.split();
    let mut reservation = responder.try_reserve(bytes.len()).unwrap().expect("few are in flight");
    reservation.copy_from_slice(bytes);
    reservation.reply().unwrap();
}

/// Each number returns once.
fn ask(name: &str, rounds: u64) {
    let mut client = Client::connect(name).unwrap();
    let mut sum = 0;
    for number in 0..rounds + 8 {
        if number < rounds {
            client.submit(&number.to_ne_bytes()).unwrap();
        }
        if number >= 8 {
            sum += u64::from_ne_bytes((*client.completion().unwrap()).try_into().unwrap());
        }
    }
    assert_eq!(sum, (0..rounds).sum());
}

/// A pool whose threads all stream to one client, through a lane that is full most of the time. Each thread waits for
/// free space, or for its turn to wait, and detects its own cancel.
fn streams(rounds: u64) {
    let dir = tempfile::tempdir().unwrap();
    let name = format!("unix:{}/streams", dir.path().display());
    let options = Options::new().capacity(1 << 16);
    let mut service = Service::listen_with(&name, &options).unwrap();
    let stopper = service.stopper();
    std::thread::scope(|scope| {
        let serving = scope.spawn(move || {
            service.run(3, |request| {
                let mut responder = request.into_responder();
                while !responder.is_cancelled() {
                    responder.part(&[7; 3000]).unwrap();
                }
                responder.end().unwrap();
            })
        });
        let mut client = Client::connect_with(&name, &options.cast()).unwrap();
        for _ in 0..rounds {
            let streams = [(); 3].map(|()| client.submit(b"stream").unwrap());
            let mut silent = streams.to_vec();
            while !silent.is_empty() {
                let part = client.completion().unwrap();
                assert_eq!(part.outcome(), Outcome::Part);
                silent.retain(|stream| *stream != part.call_id());
            }
            for stream in streams {
                assert!(client.cancel(stream).unwrap());
            }
            // The remaining parts are dropped on arrival.
            while client.in_flight() > 0 {
                assert!(client.try_completion().unwrap().is_none());
                std::thread::yield_now();
            }
        }
        stopper.stop();
        serving.join().unwrap().unwrap();
    });
    println!("{rounds} streams");
}
