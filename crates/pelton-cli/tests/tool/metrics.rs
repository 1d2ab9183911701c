//! `metrics`: what it prints and serves, by Prometheus's own tools, and the rules and the dashboard of docs/metrics.
//! Other tests have channels at the same time, so each has names of its own.

use crate::test_dirs;
use pelton_testkit::{Process, ProgramDirs, eventually, json};
use rustix::process::Signal;
use std::{
    collections::BTreeSet,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    process::{Command, Stdio},
};

const METRICS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics/");

/// Whether a program of Debian's package `prometheus` is there; CI installs it.
fn has(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    assert!(found || std::env::var_os("PELTON_CI").is_none(), "{program} is missing: ./run installs it");
    if !found {
        println!("skipped: there is no {program}");
    }
    found
}

/// Two messages that wait in a directory whose name needs escapes, and one that has passed by a name.
fn channels(dirs: &ProgramDirs, name: &str) -> (Process, Process) {
    let mut sender = dirs.start(&["send", "path:a \"quoted\" \\ name"]);
    sender.write(b"one\ntwo\n");
    sender.finish().assert(0, &[]);
    let receiver = dirs.start(&["recv", name]);
    let mut sender = dirs.start(&["send", name]);
    sender.write(b"hello\n");
    assert_eq!(receiver.line(), "hello");
    (sender, receiver)
}

fn printed(dirs: &ProgramDirs, options: &[&str]) -> String {
    let ended = dirs.run(&[&["metrics", "--root", "."], options].concat());
    ended.assert(0, &[]);
    String::from_utf8(ended.stdout).unwrap()
}

/// Starts the server. Returns it, and its address.
fn serving(dirs: &ProgramDirs, options: &[&str]) -> (Process, String) {
    let server = dirs.start(&[&["metrics", "--root", ".", "--listen", "127.0.0.1:0"], options].concat());
    let line = server.line();
    let address = line.strip_prefix("http://").and_then(|rest| rest.strip_suffix("/metrics")).unwrap().to_owned();
    (server, address)
}

fn get(address: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn the_numbers_of_each_channel_are_printed_in_both_formats() {
    let dirs = test_dirs();
    let _channel = channels(&dirs, "printed-numbers");
    let text = printed(&dirs, &[]);
    let path = format!("path:{}", std::fs::canonicalize(dirs.path("work")).unwrap().display());
    let queue = format!(r#"{{channel="{path}/a \"quoted\" \\ name",kind="path""#);
    for wanted in [
        "# TYPE pelton_sent_messages counter\n",
        &format!("\npelton_sent_messages_total{queue}}} 2\n"),
        &format!("\npelton_sent_bytes_total{queue}}} 6\n"),
        &format!("\npelton_waiting_messages{queue}}} 2.0\n"),
        &format!("\npelton_channel_state{queue},state=\"nobody reads\"}} 1\n"),
        "\npelton_received_messages_total{channel=\"printed-numbers\",kind=\"connect\"} 1\n",
        "\npelton_capacity_bytes{channel=\"printed-numbers\",kind=\"connect\"} 67108864.0\n",
        "\npelton_channels_omitted 0\n",
    ] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
    assert!(text.ends_with("# EOF\n"), "{text}");
    let text = printed(&dirs, &["--format", "text"]);
    assert!(text.contains("# TYPE pelton_sent_messages_total counter\n") && !text.contains("# EOF"), "{text}");
    let object = json(&dirs.run(&["metrics", "--root", ".", "--json"]));
    let value = |name: &str, channel: &str| {
        let metric = object["metrics"].as_array().unwrap().iter().find(|metric| metric["name"] == name).unwrap();
        let mut samples = metric["samples"].as_array().unwrap().iter();
        let sample = samples.find(|sample| sample["labels"]["channel"].as_str().unwrap().ends_with(channel));
        (metric["type"].clone(), sample.unwrap()["value"].clone())
    };
    let name = "/a \"quoted\" \\ name";
    assert_eq!(value("pelton_sent_bytes_total", name), ("counter".into(), 6.into()), "{object}");
    assert_eq!(value("pelton_waiting_messages", name), ("gauge".into(), 2.0.into()), "{object}");
    // Both have the same metrics.
    let described = |text: &str| text.matches("# TYPE ").count();
    assert_eq!(object["metrics"].as_array().unwrap().len(), described(&text), "{object}");
    if has("promtool") {
        let mut promtool = Command::new("promtool");
        promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut promtool = Process::start(promtool);
        promtool.write_all_and_close(text.into_bytes());
        let checked = promtool.wait();
        checked.assert(0, &[]);
        assert_eq!((checked.stdout, checked.stderr), (Vec::new(), String::new()));
    }
    // The number of series is limited.
    let text = printed(&dirs, &["--channels-max", "1"]);
    assert_eq!(text.matches("pelton_lanes{").count(), 1, "{text}");
    assert!(!text.contains("\npelton_channels_omitted 0\n"), "{text}");
}

/// Its subscribers share a publisher's lane: what it sends counts once, and each of them receives it.
#[test]
fn a_broadcast_counts_its_publisher_once() {
    let dirs = test_dirs();
    for channel in ["broadcast-numbers", "path:broadcast"] {
        let mut publisher = dirs.start(&["pub", channel, "--subscribers", "2", "--capacity", "64K"]);
        publisher.write(b"one\ntwo\n");
        let subscribers = [(); 2].map(|()| dirs.start(&["sub", channel]));
        for subscriber in &subscribers {
            assert_eq!((subscriber.line(), subscriber.line()), ("one".to_owned(), "two".to_owned()));
        }
        let name = match channel.strip_prefix("path:") {
            Some(directory) => {
                let directory = std::fs::canonicalize(dirs.path("work")).unwrap().join(directory);
                format!("path:{}", directory.display())
            }
            None => channel.to_owned(),
        };
        let wanted = [
            ("sent_messages_total", "2"),
            ("sent_bytes_total", "6"),
            ("received_messages_total", "4"),
            ("lanes", "1.0"),
            ("capacity_bytes", "65536.0"),
        ]
        .map(|(metric, value)| format!("\npelton_{metric}{{channel=\"{name}\",kind=\"broadcast\"}} {value}\n"));
        // Releases follow the lines.
        eventually("the numbers", || {
            let text = printed(&dirs, &[]);
            wanted.iter().all(|wanted| text.contains(wanted))
        });
    }
}

#[test]
fn a_server_answers_clients_side_by_side_until_a_signal() {
    let dirs = test_dirs();
    let (mut sender, receiver) = channels(&dirs, "served-numbers");
    let (server, address) = serving(&dirs, &[]);
    // One that connects and says nothing keeps no other one waiting.
    let _silent = TcpStream::connect(&address).unwrap();
    let request = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
    let first = get(&address, request);
    assert!(first.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"), "{first}");
    let sent = "pelton_sent_messages_total{channel=\"served-numbers\",kind=\"connect\"} ";
    assert!(first.contains(&format!("{sent}1\n")), "{first}");
    sender.write(b"again\n");
    assert_eq!(receiver.line(), "again");
    let second = get(&address, "GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text\r\n\r\n");
    assert!(second.contains(&format!("{sent}2\n")) && second.ends_with("# EOF\n"), "{second}");
    assert!(get(&address, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
    // The address is taken.
    dirs.run(&["metrics", "--listen", &address]).assert(3, &["choose another address"]);
    let json = dirs.start(&["metrics", "--listen", "127.0.0.1:0", "--json"]);
    let line: serde_json::Value = serde_json::from_str(&json.line()).unwrap();
    let other = line["url"].as_str().and_then(|url| url.strip_prefix("http://")?.strip_suffix("/metrics")).unwrap();
    assert!(get(other, request).contains(&format!("{sent}2\n")));
    for server in [server, json] {
        server.signal(Signal::TERM);
        server.wait().assert(143, &[]);
    }
}

#[test]
fn prometheus_scrapes_it_and_its_rules_and_dashboard_use_what_is_there() {
    let dirs = test_dirs();
    let _channel = channels(&dirs, "scraped-numbers");
    let names = |text: &str| -> BTreeSet<String> {
        let starts = text.match_indices("pelton_").map(|(at, _)| &text[at..]);
        starts.map(|rest| rest.chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect()).collect()
    };
    let there = names(&printed(&dirs, &["--format", "text"]));
    for file in ["pelton.rules.yml", "pelton.rules.test.yml", "pelton.dashboard.json"] {
        let text = std::fs::read_to_string(format!("{METRICS}{file}")).unwrap();
        let used = names(&text);
        assert!(used.len() > 5 && used.is_subset(&there), "{file} uses {:?}", used.difference(&there));
    }
    // Labels: the exported ones, and those that Prometheus adds.
    let object = json(&dirs.run(&["metrics", "--root", ".", "--json"]));
    let samples = object["metrics"].as_array().unwrap().iter().flat_map(|metric| metric["samples"].as_array().unwrap());
    let mut labels: BTreeSet<&str> =
        samples.flat_map(|sample| sample["labels"].as_object().unwrap().keys()).map(String::as_str).collect();
    assert_eq!(labels, BTreeSet::from(["channel", "kind", "side", "state"]), "{object}");
    labels.extend(["instance", "job"]);
    let places = [
        r"(?:by|on) \(([^)]*)\)",
        r"(\w+)(?:=~|!~|!=|=)\\?[\x22]",
        r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}",
        r"label_values\(\w+, (\w+)\)",
    ];
    let mut of_place = [0; 4];
    for file in ["pelton.rules.yml", "pelton.dashboard.json"] {
        let text = std::fs::read_to_string(format!("{METRICS}{file}")).unwrap();
        for (place, count) in places.iter().zip(&mut of_place) {
            for found in regex::Regex::new(place).unwrap().captures_iter(&text) {
                for label in found[1].split(", ") {
                    assert!(
                        labels.contains(label),
                        "{file} uses the label {label}, which is not exported: {}",
                        &found[0]
                    );
                    *count += 1;
                }
            }
        }
    }
    assert!(of_place.iter().all(|count| *count > 1), "labels found by each of the places: {of_place:?}");
    let text = std::fs::read_to_string(format!("{METRICS}pelton.dashboard.json")).unwrap();
    let dashboard: serde_json::Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    assert!(panels.len() >= 8);
    let mut expressions = Vec::new();
    for (index, panel) in panels.iter().enumerate() {
        let datasource = serde_json::json!({"type": "prometheus", "uid": "${datasource}"});
        assert_eq!(panel["datasource"], datasource, "{panel}");
        let place = |panel: &serde_json::Value| ["x", "y", "w", "h"].map(|of| panel["gridPos"][of].as_u64().unwrap());
        let [x, y, w, h] = place(panel);
        assert!(w > 0 && h > 0 && x + w <= 24, "{panel}");
        for other in &panels[..index] {
            let [left, top, width, height] = place(other);
            let is_apart = x >= left + width || left >= x + w || y >= top + height || top >= y + h;
            assert!(is_apart && panel["id"] != other["id"] && panel["title"] != other["title"], "{panel} {other}");
        }
        let mut references = BTreeSet::new();
        for target in panel["targets"].as_array().unwrap() {
            assert!(references.insert(target["refId"].as_str().unwrap()), "{panel}");
            assert_eq!(target["datasource"], datasource, "{panel}");
            expressions.push(target["expr"].as_str().unwrap());
        }
    }
    if !has("promtool") || !has("prometheus") {
        return;
    }
    for arguments in [&["check", "rules", "pelton.rules.yml"][..], &["test", "rules", "pelton.rules.test.yml"]] {
        let checked = Command::new("promtool").args(arguments).current_dir(METRICS).output().unwrap();
        assert!(checked.status.success(), "{arguments:?}: {checked:?}");
    }

    let (server, address) = serving(&dirs, &[]);
    // A port that is free now; another program could take it first, and then Prometheus ends.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let configuration = format!(
        "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: ['{METRICS}pelton.rules.yml']\n\
         scrape_configs: [{{job_name: pelton, static_configs: [{{targets: ['{address}']}}]}}]\n"
    );
    dirs.file("prometheus.yml", configuration.as_bytes());
    let mut command = Command::new("prometheus");
    command.args(["--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=warn"]);
    command.arg(format!("--web.listen-address={port}")).current_dir(dirs.path("work"));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let prometheus = Process::start(command);
    let query = |path: &str| -> Option<serde_json::Value> {
        let mut stream = TcpStream::connect(port).ok()?;
        stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        serde_json::from_str(text.split_once("\r\n\r\n")?.1).ok()
    };
    let mut found = serde_json::Value::Null;
    eventually("Prometheus has the numbers", || {
        found = query("/api/v1/query?query=pelton_sent_messages_total").unwrap_or_default();
        found["data"]["result"].as_array().is_some_and(|result| !result.is_empty())
    });
    let of = |name: &str| {
        let result = found["data"]["result"].as_array().unwrap();
        let series = result.iter().find(|series| series["metric"]["channel"].as_str().unwrap().ends_with(name));
        series.unwrap_or_else(|| panic!("{name}: {found}"))["value"][1].clone()
    };
    assert_eq!((of("scraped-numbers"), of("/a \"quoted\" \\ name")), ("1".into(), "2".into()));
    // It understood the whole text, its types too.
    let up = query("/api/v1/query?query=up").unwrap();
    assert_eq!(up["data"]["result"][0]["value"][1], "1", "{up}");
    let types = query("/api/v1/metadata?metric=pelton_sent_messages").unwrap();
    assert_eq!(types["data"]["pelton_sent_messages"][0]["type"], "counter", "{types}");
    // Each of the dashboard's expressions finds something, with its variables as for all machines and channels. That
    // of channels which are not well finds the one that nobody reads.
    for expression in expressions {
        let all = expression.replace("$instance", ".*").replace("$channel", ".*").replace("$__rate_interval", "1m");
        assert!(!all.contains('$'), "a variable that the dashboard does not define: {expression}");
        let encoded: String = all.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let mut found = serde_json::Value::Null;
        // A rate needs two scrapes.
        eventually(&format!("Prometheus evaluates {expression}"), || {
            found = query(&format!("/api/v1/query?query={encoded}")).unwrap_or_default();
            assert!(found.is_null() || found["status"] == "success", "{expression}: {found}");
            found["data"]["result"].as_array().is_some_and(|result| !result.is_empty())
        });
    }
    let rules = query("/api/v1/rules").unwrap();
    assert_eq!(rules["data"]["groups"][0]["rules"].as_array().map(Vec::len), Some(8), "{rules}");
    prometheus.signal(Signal::TERM);
    prometheus.wait();
    server.signal(Signal::TERM);
    server.wait().assert(143, &[]);
}
