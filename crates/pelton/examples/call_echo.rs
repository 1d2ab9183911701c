//! What an echo by calls costs: `call_echo BYTES CALLS [block|spin|asleep] [IN_FLIGHT]`. The service is another process.
//! Prints the median and the 99th percentile of a round trip, or, with several in flight, calls a second.

use pelton::{Client, Options, Wait};
use std::time::{Duration, Instant};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().collect();
    let word = |place: usize, usual: &str| words.get(place).cloned().unwrap_or_else(|| usual.to_owned());
    let wait = if word(3, "spin") == "spin" { Wait::Spin } else { Wait::Block };
    let options = Options::new().wait(wait);
    if let Ok(name) = std::env::var("PELTON_SERVE") {
        let mut service = options.listen_service(&name)?;
        loop {
            let mut request = service.receive()?;
            if request.is_notification() {
                return Ok(());
            }
            // In place, there and back, where it fits and there is room.
            let (bytes, responder) = request.split();
            if let Ok(Some(mut room)) = responder.try_reserve(bytes.len()) {
                room.copy_from_slice(bytes);
                room.reply(bytes.len())?;
                continue;
            }
            let (bytes, responder) = request.into_parts();
            responder.reply(&bytes)?;
        }
    }
    let (bytes, count) = (word(1, "64").parse::<usize>()?, word(2, "1000000").parse::<usize>()?);
    let in_flight = word(4, "1").parse::<usize>()?;
    let name = format!("unix:{}/call-echo-{}", std::env::temp_dir().display(), std::process::id());
    let mut child =
        std::process::Command::new(std::env::current_exe()?).args(&words[1..]).env("PELTON_SERVE", &name).spawn()?;
    let mut client = options.connect_deadline(Instant::now() + Duration::from_secs(5)).connect_client(&name)?;
    let request: Vec<u8> = (0..bytes).map(|place| place as u8).collect();
    if in_flight > 1 {
        many(&mut client, &request, count, in_flight)?;
    } else {
        one_by_one(&mut client, &request, count, word(3, "spin") == "asleep")?;
    }
    client.notify(b"end")?;
    child.wait()?;
    Ok(())
}

fn one_by_one(client: &mut Client, request: &[u8], count: usize, asleep: bool) -> pelton::Result<()> {
    let mut times = Vec::with_capacity(count);
    let (mut wrong, mut reply) = (0, Vec::new());
    let begin = Instant::now();
    for _ in 0..count {
        if asleep {
            std::thread::sleep(Duration::from_micros(100));
        }
        let start = Instant::now();
        client.call(request)?.copy_into(&mut reply);
        times.push(start.elapsed());
        wrong += usize::from(reply != request);
    }
    let all = begin.elapsed();
    times.sort_unstable();
    println!(
        "{} B: median {:?}, p99 {:?}, mean {:?} of {count} calls, {wrong} wrong",
        request.len(),
        times[count / 2],
        times[count * 99 / 100],
        all / count as u32
    );
    Ok(())
}

fn many(client: &mut Client, request: &[u8], count: usize, in_flight: usize) -> pelton::Result<()> {
    let (mut asked, mut answered, mut wrong) = (0, 0, 0);
    let begin = Instant::now();
    while answered < count {
        while asked < count && client.in_flight() < in_flight && client.try_submit(request)?.is_some() {
            asked += 1;
        }
        wrong += usize::from(*client.completion()? != *request);
        answered += 1;
    }
    let per_second = count as f64 / begin.elapsed().as_secs_f64();
    println!("{} B, {in_flight} in flight: {per_second:.0} calls/s, {wrong} wrong", request.len());
    Ok(())
}
