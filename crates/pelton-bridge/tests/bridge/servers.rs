//! Servers that want secrets or certificates, that sync each message, and that have no space left.

use crate::{DEADLINE, Place, Running, Server, bridge, eventually, next, refused, server_program, support::free_port};
use nkeys::KeyPair;
use pelton::Options;
use pelton_testkit::is_root;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa};
use serde_json::{Value, json};
use std::process::Command;

impl Place {
    fn write(&self, name: &str, text: &str) -> String {
        let path = self.path(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// Two bridges with these options carry a message.
    #[track_caller]
    fn carries(&self, options: &[&str]) {
        let with = |more: &[&'static str]| [more, options].concat();
        let _out = self.out(&with(&["--create"]));
        let _in = self.in_(&with(&["--create"]));
        Options::new().create_sender(self.path("a")).unwrap().send(b"hello").unwrap();
        assert_eq!(next(&mut self.receiver()), "hello");
    }
}

#[test]
fn a_token_and_an_nkey_come_from_files() {
    let Some(place) = Place::new(&["authorization { token: \"t k\" }"]) else { return };
    let (right, wrong) = (place.write("right", "t k\n"), place.write("wrong", "x\n"));
    refused(place.out(&["--token-file", &wrong, "--create"]), 3, &["refused"]);
    place.carries(&["--token-file", &right]);

    let user = KeyPair::new_user();
    let option = format!("authorization {{ users = [ {{ nkey: {} }} ] }}", user.public_key());
    let place = Place::new(&[&option]).expect("there was a server");
    let right = place.write("right", &user.seed().unwrap());
    let wrong = place.write("wrong", &KeyPair::new_user().seed().unwrap());
    let damaged = place.write("damaged", "SUA");
    refused(place.out(&["--nkey", &wrong, "--create"]), 3, &["refused"]);
    refused(place.out(&["--nkey", &damaged, "--create"]), 3, &["refused"]);
    place.carries(&["--nkey", &right]);
}

/// A JWT of NATS: what `issuer` says about `subject`.
fn jwt(issuer: &KeyPair, subject: &str, nats: Value) -> String {
    let encoded = |value: Value| data_encoding::BASE64URL_NOPAD.encode(value.to_string().as_bytes());
    let claims = json!({
        "jti": subject, "iat": 1, "iss": issuer.public_key(), "sub": subject, "name": "test", "nats": nats,
    });
    let text = format!("{}.{}", encoded(json!({"typ": "JWT", "alg": "ed25519-nkey"})), encoded(claims));
    let signature = data_encoding::BASE64URL_NOPAD.encode(&issuer.sign(text.as_bytes()).unwrap());
    format!("{text}.{signature}")
}

#[test]
fn a_credentials_file_is_a_jwt_and_its_seed() {
    let (operator, account, system) = (KeyPair::new_operator(), KeyPair::new_account(), KeyPair::new_account());
    let user = KeyPair::new_user();
    let any = json!({
        "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": true, "conn": -1, "leaf": -1,
        "mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1,
    });
    let of_account = json!({"type": "account", "version": 2, "limits": any});
    let without_jetstream = json!({"type": "account", "version": 2, "limits": {
        "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": true, "conn": -1, "leaf": -1,
    }});
    let options = [
        format!("operator: {}", jwt(&operator, &operator.public_key(), json!({"type": "operator", "version": 2}))),
        format!("system_account: {}", system.public_key()),
        "resolver: MEMORY".to_owned(),
        format!(
            "resolver_preload: {{ {}: {}, {}: {} }}",
            account.public_key(),
            jwt(&operator, &account.public_key(), of_account),
            system.public_key(),
            jwt(&operator, &system.public_key(), without_jetstream)
        ),
    ];
    let Some(place) = Place::new(&options.each_ref().map(String::as_str)) else { return };
    let of_user = |issuer: &KeyPair| {
        let allowed =
            json!({"type": "user", "version": 2, "pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1});
        format!(
            "-----BEGIN NATS USER JWT-----\n{}\n------END NATS USER JWT------\n\n-----BEGIN USER NKEY \
             SEED-----\n{}\n------END USER NKEY SEED------\n",
            jwt(issuer, &user.public_key(), allowed),
            user.seed().unwrap()
        )
    };
    let right = place.write("right.creds", &of_user(&account));
    let wrong = place.write("wrong.creds", &of_user(&KeyPair::new_account()));
    let of_system = place.write("system.creds", &of_user(&system));
    refused(place.out(&["--creds", &wrong, "--create"]), 3, &["refused"]);
    refused(place.out(&["--creds", &place.write("empty", ""), "--create"]), 2, &["empty"]);
    refused(place.out(&["--creds", &of_system]), 3, &["no JetStream for this account"]);
    place.carries(&["--creds", &right]);
    let out = place.out(&["--creds", &right, "--id", "other"]);
    let (_, errors) = { out }.wait();
    assert!(!errors.contains(&user.seed().unwrap()), "{errors}");
}

#[test]
fn tls_is_checked_on_both_sides() {
    let authority = |name: &str| {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        CertifiedIssuer::self_signed(params, rcgen::KeyPair::generate().unwrap()).unwrap()
    };
    let (ours, other) = (authority("ours"), authority("other"));
    let of = |name: &str, usage: ExtendedKeyUsagePurpose| {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.extended_key_usages.push(usage);
        let key = rcgen::KeyPair::generate().unwrap();
        (params.signed_by(&key, &ours).unwrap().pem(), key.serialize_pem())
    };
    let here = tempfile::tempdir_in("/dev/shm").unwrap();
    let write = |name: &str, text: &str| {
        let path = here.path().join(name).display().to_string();
        std::fs::write(&path, text).unwrap();
        path
    };
    let (server, server_key) = of("127.0.0.1", ExtendedKeyUsagePurpose::ServerAuth);
    let (client, client_key) = of("bridge", ExtendedKeyUsagePurpose::ClientAuth);
    let (server, server_key) = (write("server", &server), write("server-key", &server_key));
    let (client, client_key) = (write("client", &client), write("client-key", &client_key));
    let (ours, other) = (write("ours", &ours.pem()), write("other", &other.pem()));
    let option = format!("tls {{ cert_file: {server:?}, key_file: {server_key:?}, ca_file: {ours:?}, verify: true }}");
    let Some(place) = Place::new(&[&option]) else { return };
    let certified = ["--tls-cert", &client, "--tls-key", &client_key];
    refused(place.out(&[&["--create", "--tls-ca", &other], &certified[..]].concat()), 3, &["certificate", "--tls-ca"]);
    refused(place.out(&["--create", "--tls-ca", &ours]), 3, &["--tls-cert"]);
    place.carries(&[&["--tls", "--tls-ca", &ours], &certified[..]].concat());

    // A server without TLS, of which it is required.
    let place = Place::new(&[]).expect("there was a server");
    refused(place.out(&["--tls", "--create"]), 3, &["without TLS"]);
}

#[test]
fn a_server_that_does_not_sync_each_message_is_refused_if_that_is_required() {
    for (option, is_synced) in [("", false), ("sync_interval: always", true)] {
        let port = crate::free_port();
        let monitor = format!("127.0.0.1:{port}");
        let jetstream = format!("jetstream {{ store_dir: store, {option} }}");
        let Some(place) = Place::new(&[&format!("http: {monitor:?}"), &jetstream]) else { return };
        let words = ["--create", "--require-sync", &monitor];
        match is_synced {
            true => place.carries(&["--require-sync", &monitor]),
            false => refused(place.out(&words), 3, &["sync_interval"]),
        }
        let nobody = format!("127.0.0.1:{}", crate::free_port());
        refused(place.out(&["--create", "--require-sync", &nobody]), 4, &[&nobody]);
    }
}

#[test]
fn a_full_stream_and_a_full_account_are_reported_and_nothing_is_lost() {
    let accounts = "accounts { A { jetstream { max_file: 1000000 }, users: [ { user: u, password: p } ] } }";
    let Some(place) = Place::new(&[accounts]) else { return };
    let secret = place.write("secret", "u\np\n");
    let out = place.out(&["--user-file", &secret, "--create"]);
    out.says("out: ");
    let mut sender = place.sender();
    for number in 0..40 {
        sender.send(&[number; 50_000]).unwrap();
    }
    out.says("limit of the account");
    let client = place.runtime.block_on(async {
        let options = async_nats::ConnectOptions::with_user_and_password("u".to_owned(), "p".to_owned());
        async_nats::jetstream::new(options.connect(place.server.url()).await.unwrap())
    });
    let _in = place.in_(&["--user-file", &secret, "--allow-limits"]);
    let mut receiver = place.receiver();
    let stream = place.runtime.block_on(client.get_stream("S")).unwrap();
    for number in 0..40 {
        assert!(receiver.find_record(pelton::Deadline::from(DEADLINE)).unwrap().is_some());
        assert!(*receiver.receive().unwrap() == [number; 50_000], "message {number}");
        // What has been read may go, except the last message of the subject.
        place.runtime.block_on(async { stream.purge().sequence(u64::from(number) + 1).await.unwrap() });
    }
    eventually("everything to be released", || sender.unreleased() == 0);

    let place = Place::new(&[]).expect("there was a server");
    place.make_stream(async_nats::jetstream::stream::Config {
        max_messages: 2,
        discard: async_nats::jetstream::stream::DiscardPolicy::New,
        ..Default::default()
    });
    let mut sender = place.sender();
    let out = place.out(&[]);
    for text in ["1", "2", "3"] {
        sender.send(text.as_bytes()).unwrap();
    }
    out.says("the stream S is full");
    assert!(sender.unreleased() > 0);
    let mut config = place.runtime.block_on(place.jetstream().get_stream("S")).unwrap().cached_info().config.clone();
    config.max_messages = 3;
    place.runtime.block_on(place.jetstream().update_stream(config)).unwrap();
    let _in = place.in_(&[]);
    let mut receiver = place.receiver();
    assert_eq!([next(&mut receiver), next(&mut receiver), next(&mut receiver)], ["1", "2", "3"]);
}

/// The server's files are on a small tmpfs in a mount namespace of its own. It fills, the server disables JetStream;
/// then there is more space, and the server starts again.
#[test]
fn a_full_disk_of_the_server_loses_nothing() {
    let Some(program) = server_program() else { return };
    if !is_root() {
        return eprintln!("SKIPPED: mounting a small file system needs root");
    }
    let here = tempfile::tempdir_in("/dev/shm").unwrap();
    let disk = here.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let mut command = Command::new("unshare");
    let mount = "mount -t tmpfs -o size=3m none \"$0\" && echo mounted >&2 && exec sleep 3600";
    let holder = Running::start("unshare", command.args(["-m", "sh", "-c", mount]).arg(&disk));
    holder.says("mounted");
    // Runs a program in the namespace.
    let inside = here.path().join("inside");
    let text = format!("#!/bin/sh\nexec nsenter -m -t {} \"$@\"\n", holder.pid());
    std::fs::write(&inside, text).unwrap();
    let run = |words: &[&str]| {
        let mut command = Command::new("sh");
        assert!(command.arg(&inside).args(words).status().unwrap().success(), "{words:?}");
    };
    let wrapper = here.path().join("server");
    let text = format!("#!/bin/sh\nexec sh {} {} \"$@\"\n", inside.display(), program.display());
    std::fs::write(&wrapper, text).unwrap();
    std::fs::set_permissions(&wrapper, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let store = format!("jetstream {{ store_dir: {:?}, max_file_store: 1000000000 }}", disk.display().to_string());
    let mut place = Place::of(here, Server::start(&wrapper, &disk.with_file_name("nats"), &[&store]));
    let _out = place.out(&["--create"]);
    let mut sender = place.sender();
    const COUNT: u8 = 120;
    for number in 0..COUNT {
        while let Err(error) = sender.send(&[number; 50_000]) {
            assert!(error.is_peer_died() || error.is_closed(), "{error}");
            sender.resume_until(std::time::Instant::now()).unwrap();
        }
    }
    let server = &place.server.process;
    eventually("the disk to be full", || server.errors().contains("no space left on device"));
    assert!(sender.unreleased() > 0);
    run(&["mount", "-o", "remount,size=64m", &disk.display().to_string()]);
    place.server.process.kill();
    place.server.start_again();
    place.server.wait_until_up();
    let _in = place.in_(&["--create"]);
    let mut receiver = place.receiver();
    for number in 0..COUNT {
        assert!(receiver.find_record(pelton::Deadline::from(DEADLINE)).unwrap().is_some());
        assert!(*receiver.receive().unwrap() == [number; 50_000], "message {number}");
    }
    eventually("everything to be released", || sender.unreleased() == 0);
}

#[test]
fn a_stream_is_created_as_soon_as_the_cluster_has_enough_servers() {
    let ports = [0; 3].map(|_| free_port());
    let options = ports.map(|port| {
        let others = ports.iter().filter(|other| **other != port);
        let routes: Vec<String> = others.map(|other| format!("\"nats://127.0.0.1:{other}\"")).collect();
        let routes = routes.join(", ");
        let cluster = format!("cluster {{ name: c, listen: \"127.0.0.1:{port}\", routes: [ {routes} ] }}");
        [format!("server_name: server{port}"), cluster]
    });
    let options = options.each_ref().map(|options| options.each_ref().map(String::as_str));
    let Some(place) = Place::new(&options[0]) else { return };
    let program = server_program().expect("there was one");
    let start =
        |index: usize| Server::start(&program, &place.here.path().join(format!("nats{index}")), &options[index]);
    let _second = start(1);
    let jetstream = place.jetstream();
    let config = || async_nats::jetstream::stream::Config { name: "OTHER".to_owned(), ..Default::default() };
    // After ten seconds without the third server.
    eventually("two servers to have a leader", || {
        place.runtime.block_on(jetstream.get_or_create_stream(config())).is_ok()
    });
    let in_vain = place.in_(&["--create", "--require-replicas", "3"]);
    refused(in_vain, 3, &["creating the stream: no suitable peers", "trying again", "cannot be created"]);
    let out = place.out(&["--create", "--require-replicas", "3"]);
    out.says("creating the stream: no suitable peers");
    let _third = start(2);
    out.says("files of a majority of 3 servers");
}

#[test]
fn bridges_at_a_leaf_node_use_the_domain_behind_it() {
    let port = free_port();
    let hub = format!("leafnodes {{ listen: \"127.0.0.1:{port}\" }}");
    let domain = |name: &str| format!("jetstream {{ store_dir: store, domain: {name} }}");
    let Some(mut place) = Place::new(&[&hub, "server_name: hub", &domain("hub")]) else { return };
    let remote = format!("leafnodes {{ remotes: [ {{ url: \"nats-leaf://127.0.0.1:{port}\" }} ] }}");
    let program = server_program().expect("there was one");
    let options = [remote.as_str(), "server_name: leaf", &domain("leaf")];
    let leaf = Server::start(&program, &place.here.path().join("leaf"), &options);
    // Both bridges know the leaf only; the stream is in the hub.
    let start = |name: &'static str, words: &[&str]| {
        let common = ["--nats", &leaf.url(), "--stream", "S", "--domain", "hub", "--create"];
        Running::start(name, bridge(words).args(common))
    };
    let (a, b) = (place.channel("a"), place.channel("b"));
    let out = start("out", &["out", &a, "--subject", "s.a"]);
    let inward = start("in", &["in", "s.a", &b]);
    out.says("out: ");
    inward.says("in: ");
    let (mut sender, mut receiver) = (place.sender(), place.receiver());
    sender.send(b"one").unwrap();
    assert_eq!(next(&mut receiver), "one");
    // The link is down: messages wait in the channel.
    place.server.process.kill();
    for text in ["two", "three"] {
        sender.send(text.as_bytes()).unwrap();
    }
    place.server.start_again();
    assert_eq!((next(&mut receiver), next(&mut receiver)), ("two".to_owned(), "three".to_owned()));
    let info = place.runtime.block_on(async {
        let stream = place.jetstream_of("hub").await.get_stream("S").await.unwrap();
        stream.cached_info().state.messages
    });
    assert_eq!(info, 3);
}

impl Place {
    async fn jetstream_of(&self, domain: &str) -> async_nats::jetstream::Context {
        let client = async_nats::connect(self.server.url()).await.unwrap();
        async_nats::jetstream::with_domain(client, domain)
    }
}
