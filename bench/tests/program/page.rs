//! The page of a results file, as a browser draws it: in headless Chromium if that is installed. The tests measure the
//! results in a few small runs, and compare the page with them.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use serde_json::Value;

use crate::command::{bench, lines};

/// Runs it to its success.
fn run(command: &str) {
    let output = bench(command);
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The browser, if there is one.
fn chromium() -> Option<PathBuf> {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let path = env::var_os("PATH")?;
    env::split_paths(&path).flat_map(|place| names.map(|name| place.join(name))).find(|place| place.is_file())
}

/// The page after its script has run, in a window of `width`; `probe` runs after it and puts its result in the title.
fn drawn(page: &Path, width: u32, probe: &str) -> String {
    let with_probe = page.with_file_name(format!("probe-{width}.html"));
    let text = fs::read_to_string(page).unwrap();
    let errors =
        "<script>window.faults = []; window.addEventListener('error', e => window.faults.push(e.message));</script>";
    let text = text.replacen("<head>", &format!("<head>{errors}"), 1);
    let end =
        format!("<script>document.title = 'faults ' + window.faults.join('; ') + ' | ' + ({probe});</script></body>");
    fs::write(&with_probe, text.replacen("</body>", &end, 1)).unwrap();
    let profile = tempfile::tempdir().unwrap();
    let output = Command::new(chromium().unwrap())
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"])
        // The browser must load nothing.
        .args(["--host-resolver-rules=MAP * ~NOTFOUND", &format!("--window-size={width},900")])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(format!("file://{}", with_probe.display()))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let dom = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(dom.contains("</html>"), "no page: {}", String::from_utf8_lossy(&output.stderr));
    dom
}

/// What `probe` results in, if the page has no faults, and the page; None without a browser.
fn probed(page: &Path, width: u32, probe: &str) -> Option<(String, String)> {
    if chromium().is_none() {
        eprintln!("LEFT OUT: what a browser draws of the page, for Chromium is missing: install the package chromium");
        return None;
    }
    let dom = drawn(page, width, probe);
    let title = dom.split_once("<title>").and_then(|(_, rest)| rest.split_once("</title>")).expect("a title").0;
    let found = title.strip_prefix("faults  | ").unwrap_or_else(|| panic!("{title}"));
    Some((found.to_string(), dom))
}

/// Results with a part of every plot, and their page: for all tests, in the target directory.
fn results() -> &'static (PathBuf, Vec<Value>) {
    static RESULTS: OnceLock<(PathBuf, Vec<Value>)> = OnceLock::new();
    RESULTS.get_or_init(|| {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("page");
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).unwrap();
        let mut found: Vec<Value> = Vec::new();
        for command in [
            "stream --count 2000 --runs 2 --wait block --size 16 --systems pelton,pipe",
            "stream --count 2000 --runs 2 --wait block --size 256 --systems pelton,pipe,sock-seqpacket,bump",
            "stream --count 500 --runs 1 --wait block --size 1..500 --systems pelton,pipe",
            "roundtrip --count 300 --runs 1 --wait block --systems pelton,pipe",
            "roundtrip --seconds 0.002 --runs 1 --wait block --systems pelton,pipe",
            "roundtrip --count 20 --rate 1000 --runs 1 --systems pelton,pipe",
            "roundtrip --count 20 --rate 5000 --runs 1 --systems pelton,pipe",
            "memory --count 2000 --runs 1 --systems pelton,pipe",
            "kill --runs 1 --systems pelton,pipe",
            "threads --count 2000 --runs 1 --wait block --systems pelton,pelton-batches",
            "stream --count 2000 --runs 1 --wait block --placement together --systems pelton,pipe",
            "stream --count 2000 --runs 1 --wait block --placement free --systems pelton,pipe",
        ] {
            let place = directory.join("part.jsonl");
            run(&format!("{command} --results {}", place.display()));
            // The machine once.
            found.extend(lines(&fs::read(&place).unwrap()).into_iter().skip(usize::from(!found.is_empty())));
        }
        let place = directory.join("results.jsonl");
        fs::write(&place, found.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
        let (page, empty) = (directory.join("page.html"), directory.join("empty.md"));
        fs::write(&empty, "").unwrap();
        run(&format!("figures --draft {} {} --report {}", place.display(), empty.display(), page.display()));
        (page, found)
    })
}

#[test]
fn the_page_is_one_file_that_contains_the_results() {
    let (page, lines) = results();
    let text = fs::read_to_string(page).unwrap();
    for loads in ["src=", "<link", "@import", "url("] {
        assert!(!text.contains(loads), "`{loads}` would load something");
    }
    let data = text.split_once("id=\"data\">").and_then(|(_, rest)| rest.split_once("</script>")).unwrap().0;
    assert_eq!(&serde_json::from_str::<Vec<Value>>(data).unwrap(), lines);
}

#[test]
fn a_browser_draws_every_plot_and_a_table_beside_it() {
    let (page, lines) = results();
    let probe = "[document.querySelectorAll('main svg[role=img]').length, \
        document.querySelectorAll('svg[role=img]:not([aria-label])').length, \
        document.querySelectorAll('main table').length, \
        document.querySelectorAll('th:not([scope])').length].join(' ')";
    let Some((counts, dom)) = probed(page, 1200, probe) else { return };
    // Two of throughput, two by percentile, one by load (the rounds are too few for 99 %); a table for each command,
    // and two more.
    assert_eq!(counts, "5 0 14 0");
    for words in [
        "Messages a second, by message size",
        "by percentile",
        "Median, by offered load",
        "CPU s per million",
        "resident memory",
        "sender killed",
        "pelton by this: messages_per_second",
        "Download the raw data",
    ] {
        assert!(dom.contains(words), "the page does not show `{words}`");
    }
    assert!(!dom.contains("NaN") && !dom.contains(">undefined<") && !dom.contains("Infinity"));
    // Each skipped system has its reason, and each command is there.
    let skipped = lines.iter().find_map(|line| line["skipped"].as_str()).unwrap();
    assert!(dom.contains(&skipped.replace('&', "&amp;")), "{skipped}");
    for command in lines.iter().filter_map(|line| line["command"].as_str()) {
        assert!(dom.contains(command), "{command}");
    }
}

#[test]
fn any_two_systems_differ_even_without_colours() {
    // More systems than any plot has; one more name each time, as larger results would have.
    let probe = "(() => { while (labels.length < 36) labels.push('system ' + labels.length); \
        return new Set(labels.map(l => style(l).dash + '|' + style(l).mark)).size; })()";
    let found = probed(&results().0, 1000, probe);
    assert!(found.is_none_or(|(styles, _)| styles == "36"));
}

#[test]
fn a_phone_need_not_scroll_sideways_and_shows_readable_figures() {
    let (page, _) = results();
    // A headless Chromium's window is at least 500 wide: the test puts the page into a narrower frame. A drawing's
    // text has size 12: how large is that, and is any drawing wider than its place?
    let frame = page.with_file_name("frame.html");
    let text = "<!doctype html><html><head></head><body>\
        <iframe id=f style='width:360px;height:800px;border:0'></iframe></body></html>";
    fs::write(&frame, text).unwrap();
    let inner = serde_json::to_string(&fs::read_to_string(page).unwrap()).unwrap().replace('<', "\\u003c");
    let probe = format!(
        "(() => {{ const d = document.getElementById('f').contentDocument; d.open(); d.write({inner}); d.close(); \
         const e = d.documentElement; const drawings = [...d.querySelectorAll('main svg[role=img]')]; \
         const scales = drawings.map(svg => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width); \
         const wide = drawings.filter(svg => svg.getBoundingClientRect().right > e.clientWidth).length; \
         return [e.clientWidth, e.scrollWidth, d.body.dataset.drawn, Math.floor(12 * Math.min(...scales)), wide].join(' '); }})()"
    );
    let Some((found, _)) = probed(&frame, 900, &probe) else { return };
    let found: Vec<u32> = found.split(' ').map(|n| n.parse().unwrap()).collect();
    assert!(found[0] <= 360 && found[1] <= found[0] && found[2] >= 5, "{found:?}");
    assert!(found[3] >= 11, "{found:?}: text of less than 11 pixels");
    assert_eq!(found[4], 0, "a drawing goes on beyond the screen");
}

#[test]
fn no_words_of_a_drawing_overlap() {
    // Beside the page's drawings one with more decades and sizes than it has.
    let probe = "(() => { \
        const points = [1, 10, 100, 1e3, 1e4, 1e5].map(x => [x, x * x]); \
        main.append(plot('many steps', [{ label: 'a', points }], { x: 'x', y: 'y', xText: percent, yText: decimal, xTicks: ticks(1, 1e5) })); \
        const crossed = []; \
        for (const svg of document.querySelectorAll('main svg[role=img]')) { \
            const words = [...svg.querySelectorAll(':scope > text')].map(text => [text.textContent, text.getBoundingClientRect()]); \
            words.forEach(([one, a], n) => words.slice(n + 1).forEach(([other, b]) => { \
                if (a.left < b.right && b.left < a.right && a.top + 1 < b.bottom && b.top + 1 < a.bottom) crossed.push(one + ' over ' + other); })); \
        } \
        return crossed.join(', '); })()";
    for width in [1200, 500] {
        assert!(probed(&results().0, width, probe).is_none_or(|(crossed, _)| crossed.is_empty()), "{width}");
    }
}
