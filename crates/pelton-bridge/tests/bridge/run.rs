//! `run`: many bridges in one process, their reload, and `--check`.

use crate::{
    Place, next, refused, send,
    support::{Running, bridge, free_port},
};
use async_nats::jetstream::stream;
use pelton::{Options, Receiver, Sender};
use rustix::process::Signal;

fn configure(place: &Place, text: &str) -> String {
    let path = place.path("bridges.toml");
    let url = place.server.url();
    std::fs::write(&path, format!("nats = \"{url}\"\nstream = \"S\"\n{text}")).unwrap();
    path
}

#[track_caller]
fn receive(receiver: &mut Receiver, numbers: std::ops::Range<u32>) {
    for number in numbers {
        assert_eq!(next(receiver), number.to_string());
    }
}

#[test]
fn a_reload_ends_and_starts_only_what_has_changed_and_loses_nothing() {
    let Some(place) = Place::new(&[]) else { return };
    place.make_stream(stream::Config::default());
    let (path, connect) = (place.path("a"), format!("unix:{}", place.path("socket")));
    let inward = |name: &str| {
        let channel = place.channel(&format!("to-{name}"));
        format!("[[in]]\nsubject = 's.{name}'\nchannel = '{channel}'\n")
    };
    let outward = |name: &str, channel: &str, more: &str| {
        format!("[[out]]\nchannel = '{channel}'\nsubject = 's.{name}'\n{more}\n")
    };
    let channel = format!("path:{path}");
    let both =
        |more: &str| [outward("a", &channel, more), outward("b", &connect, more), inward("a"), inward("b")].concat();
    let config = configure(&place, &both(""));
    let mut running = Running::start("run", &mut bridge(&["run", &config]));
    running.says("out: unix:");
    let (mut by_path, mut by_connect) = (place.sender(), Options::new().connect_sender(&connect).unwrap());
    let receiver = |name: &str| Options::new().create_receiver(place.path(&format!("to-{name}"))).unwrap();
    let mut receivers = [receiver("a"), receiver("b")];
    let mut sent = 0;
    let mut pass = |then: &dyn Fn()| {
        for number in sent..sent + 200 {
            let text = number.to_string();
            send(&mut by_path, &text);
            persist(&mut by_connect, |sender| sender.send(text.as_bytes()));
            if number == sent + 100 {
                then();
            }
        }
        // By connect, the sender gives its messages to the next receiver.
        persist(&mut by_connect, Sender::wait_released);
        receivers.iter_mut().for_each(|receiver| receive(receiver, sent..sent + 200));
        sent += 200;
    };
    pass(&|| {});
    // Both bridges outwards change, the others go on.
    configure(&place, &both("packed = true"));
    pass(&|| running.signal(Signal::HUP));
    running.says("reload: 2 go on, 2 have ended, 2 start");
    // An invalid file changes nothing.
    configure(&place, &both("colour = 'red'"));
    pass(&|| running.signal(Signal::HUP));
    running.says("reload refused, the bridges go on as before");
    running.says("--colour");
    // One is gone, a new one that is refused does not disturb the others.
    let lost = outward("lost", &place.channel("lost"), "stream = 'NONE'").replace("stream = 'S'", "");
    configure(&place, &[both("packed = true"), lost].concat());
    pass(&|| running.signal(Signal::HUP));
    running.says("lost has ended, until the next reload: the server has no stream NONE");
    pass(&|| {});
    running.signal(Signal::TERM);
    let (code, errors) = running.wait();
    assert_eq!(code, Some(143), "{errors}");
    assert_eq!(errors.matches("out: ").count(), 4, "{errors}");
    assert_eq!(errors.matches(" from sequence ").count(), 2, "{errors}");
}

/// Does `work` on the sender of a channel by connect, also after its receiver has ended.
fn persist(sender: &mut Sender, mut work: impl FnMut(&mut Sender) -> pelton::Result<()>) {
    while let Err(error) = work(sender) {
        assert!(error.is_closed() || error.is_peer_died(), "{error}");
        sender.resume().unwrap();
    }
}

#[test]
fn a_check_says_what_would_fail_and_carries_nothing() {
    let Some(place) = Place::new(&[]) else { return };
    let channel = place.channel("a");
    let out = format!("[[out]]\nchannel = '{channel}'\nsubject = 's.a'\n");
    let check = |text: &str| Running::start("run", &mut bridge(&["run", "--check", &configure(&place, text)]));
    refused(check(&out), 3, &["out path:", "no stream S"]);
    refused(check(&format!("{out}create = true")), 0, &["can run"]);
    // It has created nothing.
    refused(check(&out), 3, &["no stream S"]);
    place.make_stream(stream::Config::default());
    refused(check(&out), 0, &["can run"]);
    refused(check(&format!("{out}require-replicas = 3")), 3, &["has 1 replicas"]);
    let nobody = format!("nats = 'nats://127.0.0.1:{}'\nconnect-timeout = 0.1\n", free_port());
    refused(check(&format!("{out}{nobody}")), 0, &["the server was not checked", "no connection"]);
    refused(check("[[in]]\nsubject = 's.a'\nchannel = 'short'\n"), 2, &["in short: ", "--position"]);
    refused(check("[[out]]\n"), 2, &["bridges.toml", "channel is missing"]);
    assert!(!std::path::Path::new(&place.path("a")).exists());
    let words = ["run", "--check", "/nowhere.toml"];
    refused(Running::start("run", &mut bridge(&words)), 2, &["/nowhere.toml"]);
}
