//! The default file of the demo, in the cache directory: events of a web shop as JSON lines, from a fixed seed.
//!
//! The same seed gives the same bytes on every machine: integer arithmetic only, no clock, no hash map. The file is
//! created under a temporary name and renamed. The demo checks it before each use, and generates a damaged one again.

use pelton_cli::failure::Failure;
use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

/// The name of the file; its number increases with each change of the bytes.
pub const NAME: &str = "corpus-1.jsonl";
/// At least 200 MiB; the last line ends a little later.
pub const BYTES_MIN: u64 = 200 << 20;
/// The seed of the corpus.
pub const SEED: u64 = 0x70656c746f6e;
/// The result of `generate(SEED, BYTES_MIN)`: size, and `Digest` of its lines.
pub const EXPECTED: (u64, u64) = (209_715_253, 5_290_364_872_688_268_977);

/// Approximate size of the blocks of lines.
const BLOCK_BYTES: usize = 1 << 20;

/// The directory of the corpus.
pub fn cache_directory() -> Result<PathBuf, Failure> {
    // The XDG base directory specification: a relative path is ignored.
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
    base.map(|base| base.join("pelton")).ok_or_else(|| {
        Failure::Input(
            "no directory for the default file: neither XDG_CACHE_HOME nor HOME is set; set one, or name a FILE"
                .to_string(),
        )
    })
}

/// Creates the corpus at `path`, replacing a file there. `progress` gets the bytes so far, and may fail.
pub fn create(path: &Path, mut progress: impl FnMut(u64) -> Result<(), Failure>) -> Result<(), Failure> {
    let failed =
        |error: io::Error| Failure::system(format_args!("cannot create the default file `{}`", path.display()), error);
    let directory = path.parent().expect("a file in the cache directory");
    fs::create_dir_all(directory).map_err(failed)?;
    let mut temporary = tempfile::Builder::new().prefix(NAME).suffix(".part").tempfile_in(directory).map_err(failed)?;
    let mut bytes = 0;
    generate(SEED, BYTES_MIN, |block| {
        temporary.write_all(block).map_err(failed)?;
        bytes += block.len() as u64;
        progress(bytes)
    })?;
    temporary.persist(path).map_err(|error| failed(error.error))?;
    Ok(())
}

/// Passes blocks of complete lines to `sink`, up to at least `bytes_min` bytes.
pub fn generate<E>(seed: u64, bytes_min: u64, mut sink: impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
    let mut events = Events { random: Random(seed), time_ms: 1_709_251_200_000, number: 0 };
    let mut block = Vec::with_capacity(BLOCK_BYTES + 16 * 1024);
    let mut bytes = 0;
    while bytes < bytes_min {
        block.clear();
        while block.len() < BLOCK_BYTES && bytes + (block.len() as u64) < bytes_min {
            events.write(&mut block).expect("a Vec takes everything");
        }
        sink(&block)?;
        bytes += block.len() as u64;
    }
    Ok(())
}

/// SplitMix64: fast, and the same on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// 0 to `end` - 1; the bias of the multiplication is too small to matter here.
    fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(end)) >> 64) as u64
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    /// Mostly near `base`, each doubling half as likely as the one before, up to 4096 times: the distribution of
    /// latencies and sizes.
    fn heavy(&mut self, base: u64) -> u64 {
        let doublings = self.next().trailing_zeros().min(12);
        (base + self.below(base)) << doublings
    }
}

const SERVICES: [&str; 8] = ["edge", "catalog", "checkout", "search", "identity", "ledger", "mailer", "recommender"];
const REGIONS: [&str; 5] = ["eu-central-1", "eu-west-2", "us-east-1", "us-west-2", "ap-south-1"];
const METHODS: [&str; 8] = ["GET", "GET", "GET", "GET", "POST", "POST", "PUT", "DELETE"];
#[rustfmt::skip]
const RESOURCES: [&str; 10] = [
    "products", "carts", "orders", "users", "reviews", "images", "stock", "prices", "sessions", "coupons",
];
const VIEWS: [&str; 8] = ["", "/items", "/history", "/related", "/availability", "/shipping", "/summary", "/comments"];
const LANGUAGES: [&str; 8] = ["de-DE", "en-GB", "en-US", "fr-FR", "ja-JP", "pl-PL", "pt-BR", "sv-SE"];
#[rustfmt::skip]
const WORDS: [&str; 48] = [
    "amber", "anchor", "basket", "birch", "bottle", "brass", "candle", "canvas", "cedar", "chair", "clay", "cotton",
    "copper", "desk", "feather", "flint", "garden", "glass", "hammer", "harbour", "kettle", "ladder", "lamp",
    "lantern", "leather", "linen", "maple", "marble", "mirror", "needle", "oak", "paper", "pepper", "pillow", "quilt",
    "ribbon", "river", "saddle", "silver", "slate", "spoon", "stone", "table", "tin", "velvet", "walnut", "wicker",
    "wool",
];
const TABLES: [&str; 7] = ["product", "cart_line", "customer", "order_line", "price", "stock_level", "session"];
const JOBS: [&str; 6] = ["reindex", "invoice-run", "thumbnail", "newsletter", "stock-sync", "fraud-score"];
const METRICS: [(&str, &str); 8] = [
    ("http.server.active_requests", "1"),
    ("process.resident_memory", "bytes"),
    ("db.pool.in_use", "1"),
    ("queue.depth", "messages"),
    ("cache.hit_ratio", "ppm"),
    ("gc.pause", "us"),
    ("disk.io.wait", "us"),
    ("net.retransmits", "segments"),
];
const FAILURES: [(&str, &str); 7] = [
    ("TimeoutError", "upstream did not answer within the deadline"),
    ("ConnectionReset", "connection reset by peer while reading the response"),
    ("ConstraintViolation", "duplicate key value violates unique constraint"),
    ("DeserializationError", "missing field `quantity` in a request body"),
    ("NullPointerException", "cannot invoke method on a value that is null"),
    ("OutOfStock", "reservation exceeds the stock level"),
    ("RateLimited", "too many requests from one client"),
];
#[rustfmt::skip]
const MODULES: [&str; 12] = [
    "api::router", "api::middleware", "cart::pricing", "cart::merge", "db::pool", "db::query", "http::client",
    "http::retry", "queue::consumer", "search::ranking", "session::store", "tax::rules",
];
#[rustfmt::skip]
const FUNCTIONS: [&str; 12] = [
    "handle", "dispatch", "call", "poll_ready", "apply_discounts", "fetch_one", "with_retry", "decode", "commit",
    "acquire", "render", "visit",
];

/// The state of the stream of events.
struct Events {
    random: Random,
    time_ms: u64,
    number: u64,
}

impl Events {
    /// Appends one event and a newline.
    fn write(&mut self, out: &mut Vec<u8>) -> io::Result<()> {
        self.time_ms += self.random.heavy(20) / 2;
        self.number += 1;
        let service = self.random.pick(&SERVICES);
        out.extend_from_slice(b"{\"time\":\"");
        write_time(self.time_ms, out)?;
        write!(out, "\",\"service\":\"{service}\",")?;
        match self.random.below(100) {
            0..52 => self.request(out)?,
            52..70 => self.metric(out)?,
            70..79 => self.query(out)?,
            79..85 => self.login(out)?,
            85..90 => self.job(out)?,
            90..95 => self.order(out)?,
            _ => self.error(out)?,
        }
        out.extend_from_slice(b"}\n");
        Ok(())
    }

    fn request(&mut self, out: &mut Vec<u8>) -> io::Result<()> {
        let random = &mut self.random;
        let (method, resource, view) = (random.pick(&METHODS), random.pick(&RESOURCES), random.pick(&VIEWS));
        let status = match random.below(1000) {
            0..880 => 200,
            880..930 => 304,
            930..960 => 404,
            960..975 => 401,
            975..990 => 429,
            990..997 => 500,
            _ => 503,
        };
        let (duration_us, sent) = (random.heavy(350), random.heavy(600));
        write!(
            out,
            r#""event":"http.request","method":"{method}","path":"/v2/{resource}/{}{view}"#,
            random.below(4_000_000)
        )?;
        if random.below(4) == 0 {
            write!(
                out,
                "?page={}&sort={}&q={}+{}",
                random.heavy(1),
                random.pick(&TABLES),
                random.pick(&WORDS),
                random.pick(&WORDS)
            )?;
        }
        write!(out, r#"","status":{status},"duration_us":{duration_us},"bytes_sent":{sent},"#)?;
        write_address(random, out)?;
        out.extend_from_slice(b",\"user_agent\":\"");
        write_agent(random, out)?;
        write!(
            out,
            r#"","language":"{}","trace":"{:016x}{:016x}","#,
            random.pick(&LANGUAGES),
            random.next(),
            random.next()
        )?;
        write!(out, r#""cache":"{}""#, random.pick(&["hit", "hit", "miss", "stale", "bypass"]))
    }

    fn metric(&mut self, out: &mut Vec<u8>) -> io::Result<()> {
        let random = &mut self.random;
        let ((name, unit), value) = (random.pick(&METRICS), random.heavy(40));
        write!(out, r#""event":"metric","name":"{name}","value":{value}"#)?;
        match random.below(3) {
            0 => Ok(()),
            1 => write!(out, r#","unit":"{unit}","host":"{}-{:02}""#, random.pick(&REGIONS), random.below(40)),
            _ => write!(
                out,
                r#","unit":"{unit}","p50":{value},"p99":{},"count":{}"#,
                value + random.heavy(90),
                random.heavy(200)
            ),
        }
    }

    fn query(&mut self, out: &mut Vec<u8>) -> io::Result<()> {
        let random = &mut self.random;
        let (table, other) = (random.pick(&TABLES), random.pick(&TABLES));
        let id = random.below(90_000_000);
        let statement = match random.below(4) {
            0 => format!("SELECT * FROM {table} WHERE id = {id}"),
            1 => format!(
                "SELECT t.id, t.updated_at FROM {table} t JOIN {other} o ON o.{table}_id = t.id WHERE t.id > {id} LIMIT 50"
            ),
            2 => format!("UPDATE {table} SET version = version + 1, updated_at = now() WHERE id = {id}"),
            _ => format!(
                "INSERT INTO {table} (id, customer_id, amount) VALUES ({id}, {}, {})",
                random.below(9_000_000),
                random.heavy(700)
            ),
        };
        let (duration_us, rows) = (random.heavy(180), random.heavy(1) - 1);
        write!(out, r#""event":"db.query","statement":"{statement}","duration_us":{duration_us},"rows":{rows},"#)?;
        write!(
            out,
            r#""pool":{{"size":{},"idle":{}}},"connection":{}"#,
            8 << random.below(3),
            random.below(8),
            random.below(64)
        )
    }

    fn login(&mut self, out: &mut Vec<u8>) -> io::Result<()> {
        let random = &mut self.random;
        let (first, second) = (random.pick(&WORDS), random.pick(&WORDS));
        let outcome = random.pick(&["ok", "ok", "ok", "wrong_password", "locked", "second_factor"]);
        write!(
            out,
            r#""event":"auth.login","user":"{first}.{second}{}@example.org","outcome":"{outcome}","#,
            random.below(3000)
        )?;
        write_address(random, out)?;
        write!(out, r#","session":"{:016x}","attempt":{}"#, random.next(), random.heavy(1))
    }

    fn job(&mut self, out: &mut Vec<u8>) -> io::Result<()> {
        let (number, random) = (self.number, &mut self.random);
        let (job, done, failed) = (random.pick(&JOBS), random.heavy(900), random.heavy(2) / 3);
        write!(out, r#""event":"job.finished","job":"{job}","id":"{job}-{number}","queued_ms":{},"#, random.heavy(25))?;
        write!(
            out,
            r#""ran_ms":{},"items":{{"done":{done},"failed":{failed}}},"worker":{}"#,
            random.heavy(400),
            random.below(24)
        )
    }

    fn order(&mut self, out: &mut Vec<u8>) -> io::Result<()> {
        let (number, random) = (self.number, &mut self.random);
        write!(out, r#""event":"order.placed","order":{number},"customer":{},"lines":["#, random.below(9_000_000))?;
        let mut total = 0;
        for line in 0..random.heavy(2).min(40) {
            let (quantity, price) = (random.heavy(1), random.heavy(400));
            total += quantity * price;
            let (comma, adjective, noun) = (if line > 0 { "," } else { "" }, random.pick(&WORDS), random.pick(&WORDS));
            write!(
                out,
                r#"{comma}{{"sku":"{:06X}-{}","title":"{adjective} {noun}","#,
                random.below(1 << 24),
                random.below(90) + 10
            )?;
            write!(out, r#""quantity":{quantity},"price_cents":{price}}}"#)?;
        }
        write!(out, r#"],"total_cents":{total},"currency":"{}","#, random.pick(&["EUR", "USD", "GBP", "SEK"]))?;
        write!(
            out,
            r#""shipping":"{}","gift":{}"#,
            random.pick(&["standard", "express", "pickup"]),
            random.below(10) == 0
        )
    }

    fn error(&mut self, out: &mut Vec<u8>) -> io::Result<()> {
        let random = &mut self.random;
        let (kind, message) = random.pick(&FAILURES);
        let level = random.pick(&["error", "error", "error", "warn", "fatal"]);
        write!(
            out,
            r#""event":"error","level":"{level}","kind":"{kind}","message":"{message} ({}="#,
            random.pick(&WORDS)
        )?;
        write!(
            out,
            r#"{}, attempt {})","trace":"{:016x}","stack":""#,
            random.below(100_000),
            random.heavy(1),
            random.next()
        )?;
        for _ in 0..random.heavy(5).min(48) {
            let (module, function) = (random.pick(&MODULES), random.pick(&FUNCTIONS));
            write!(out, r"\n  at {module}::{function} (src/{}/{}.rs", random.pick(&TABLES), random.pick(&FUNCTIONS))?;
            write!(out, ":{}:{})", random.below(900) + 1, random.below(80) + 1)?;
        }
        out.push(b'"');
        Ok(())
    }
}

/// Writes a time as RFC 3339, from 2024-03-01 on.
fn write_time(ms: u64, out: &mut Vec<u8>) -> io::Result<()> {
    // From days to a date, after Howard Hinnant's civil_from_days, for dates after 1970.
    let (days, in_day) = (ms / 86_400_000 + 719_468, ms % 86_400_000);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let (day, month) =
        (day_of_year - (153 * shifted + 2) / 5 + 1, if shifted < 10 { shifted + 3 } else { shifted - 9 });
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second, milli) = (in_day / 3_600_000, in_day / 60_000 % 60, in_day / 1000 % 60, in_day % 1000);
    write!(out, "{year}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milli:03}Z")
}

/// An address from the ranges reserved for documentation, or a private one.
fn write_address(random: &mut Random, out: &mut Vec<u8>) -> io::Result<()> {
    match random.below(3) {
        0 => write!(out, r#""client":"203.0.113.{}""#, random.below(256)),
        1 => write!(out, r#""client":"10.{}.{}.{}""#, random.below(256), random.below(256), random.below(256)),
        _ => write!(
            out,
            r#""client":"2001:db8:{:x}:{:x}::{:x}""#,
            random.below(1 << 16),
            random.below(1 << 16),
            random.below(1 << 16)
        ),
    }
}

fn write_agent(random: &mut Random, out: &mut Vec<u8>) -> io::Result<()> {
    let (major, minor) = (random.below(30) + 100, random.below(6000));
    match random.below(6) {
        0 => write!(out, "Mozilla/5.0 (X11; Linux x86_64; rv:{major}.0) Gecko/20100101 Firefox/{major}.0"),
        1 => {
            out.extend_from_slice(b"Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) ");
            write!(out, "Chrome/{major}.0.{minor}.{} Safari/537.36", random.below(200))
        }
        2 => {
            write!(
                out,
                "Mozilla/5.0 (iPhone; CPU iPhone OS 17_{} like Mac OS X) AppleWebKit/605.1.15 (KHTML, like Gecko) ",
                minor % 6
            )?;
            write!(out, "Version/17.{} Mobile/15E148 Safari/604.1", minor % 6)
        }
        3 => write!(out, "curl/8.{}.{}", minor % 10, minor % 3),
        4 => write!(out, "python-requests/2.{}.{}", major % 33, minor % 4),
        _ => write!(out, "shop-app/{}.{}.{} (Android 14; sdk 34)", major % 9 + 1, minor % 40, minor % 7),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stage::Digest;
    use std::collections::HashSet;

    fn first(seed: u64, bytes: u64) -> Vec<u8> {
        let mut all = Vec::new();
        let done: Result<(), ()> = generate(seed, bytes, |block| {
            all.extend_from_slice(block);
            Ok(())
        });
        done.unwrap();
        all
    }

    #[test]
    fn the_same_seed_generates_the_same_bytes() {
        let corpus = first(SEED, 3 << 20);
        let mut digest = Digest::default();
        corpus.split(|byte| *byte == b'\n').for_each(|line| digest.add(line));
        assert_eq!(
            (corpus.len(), digest.value()),
            (3_145_875, 13_112_744_193_820_661_873),
            "an intended change of the corpus changes NAME and EXPECTED too"
        );
        assert_ne!(corpus, first(SEED + 1, 3 << 20));
    }

    #[test]
    fn lines_are_json_and_differ_and_vary_in_length() {
        let corpus = first(SEED, 3 << 20);
        let lines: Vec<&[u8]> = corpus.strip_suffix(b"\n").unwrap().split(|byte| *byte == b'\n').collect();
        let mut kinds = HashSet::new();
        for line in &lines {
            let event: serde_json::Value = serde_json::from_slice(line).unwrap();
            kinds.insert(event["event"].as_str().unwrap().to_string());
        }
        assert_eq!(kinds.len(), 7, "{kinds:?}");
        let distinct: HashSet<&[u8]> = lines.iter().copied().collect();
        assert_eq!(distinct.len(), lines.len());
        let (shortest, longest) =
            (lines.iter().map(|line| line.len()).min().unwrap(), lines.iter().map(|line| line.len()).max().unwrap());
        assert!(shortest < 110 && longest > 2500 && longest < 16 * 1024, "{shortest} to {longest}");
    }

    #[test]
    fn times_are_dates() {
        let text = |ms| {
            let mut out = Vec::new();
            write_time(ms, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(text(1_709_251_200_000), "2024-03-01T00:00:00.000Z");
        assert_eq!(text(1_709_251_199_999), "2024-02-29T23:59:59.999Z");
        assert_eq!(text(1_735_689_599_001), "2024-12-31T23:59:59.001Z");
        assert_eq!(text(1_735_689_600_000), "2025-01-01T00:00:00.000Z");
    }
}
