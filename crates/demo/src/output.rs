//! The compressed lines: the file OUT, and the check that they decompress to the input.

use crate::{
    input::{Input, MonitoredReader},
    stage::System,
};
use pelton_cli::{failure::Failure, signals::Signals};
use std::{
    fs::{self, File},
    io::Read,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};
use tempfile::NamedTempFile;

/// Block size of reads.
const BLOCK_BYTES: usize = 128 * 1024;

/// OUT, written under a temporary name beside it.
pub struct OutputFile {
    temporary: NamedTempFile,
    path: PathBuf,
}

impl OutputFile {
    /// Creates the temporary file.
    pub fn create(path: &Path, input: &Input) -> Result<OutputFile, Failure> {
        let bad = |why: String| Failure::Input(format!("--output `{}` {why}", path.display()));
        if let Ok(metadata) = fs::metadata(path) {
            if !metadata.is_file() {
                return Err(bad("exists and is not a regular file: name another".to_string()));
            }
            if fs::metadata(&input.path)
                .is_ok_and(|input| (input.dev(), input.ino()) == (metadata.dev(), metadata.ino()))
            {
                return Err(bad("is the input itself: name another".to_string()));
            }
        }
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let temporary = tempfile::Builder::new()
            .prefix(".pelton-demo-")
            // As an ordinary new file; the umask applies.
            .permissions(fs::Permissions::from_mode(0o666))
            .tempfile_in(directory)
            .map_err(|error| bad(format!("cannot be written: {error}")))?;
        Ok(OutputFile { temporary, path: path.to_path_buf() })
    }

    /// The file to write.
    pub fn path(&self) -> &Path {
        self.temporary.path()
    }

    /// Gives it the name OUT.
    pub fn rename(self) -> Result<(), Failure> {
        let path = self.path;
        let failed = |error: tempfile::PersistError| {
            Failure::system(format_args!("cannot rename to `{}`", path.display()), error.error)
        };
        self.temporary.persist(&path).map_err(failed).map(drop)
    }
}

/// Checks that `output` decompresses to the input; returns its size.
pub fn verify(input: &Input, output: &Path, system: System, signals: &Signals) -> Result<u64, Failure> {
    let failed = |error| Failure::system("checking the output", error);
    let differs = |at: u64, why: &str| {
        Failure::Peer(format!(
            "{}: the output does not decompress to `{}`: {why} at byte {at}",
            system.label(),
            input.path.display()
        ))
    };
    let original = File::open(&input.path).map_err(failed)?;
    let compressed = File::open(output).map_err(failed)?;
    let size = compressed.metadata().map_err(failed)?.len();
    let mut decoder = zstd::Decoder::new(compressed).map_err(failed)?;
    let what = format!("checking {}", system.label());
    let mut original = MonitoredReader::new(&original, input.bytes, &what, signals);
    let (mut wanted, mut found) = (vec![0; BLOCK_BYTES], vec![0; BLOCK_BYTES]);
    let mut at = 0;
    loop {
        let wanted_bytes = read_full(&mut original, &mut wanted).map_err(failed)?;
        signals.check()?;
        let found_bytes = read_full(&mut decoder, &mut found).map_err(|error| differs(at, &error.to_string()))?;
        let (wanted, found) = (&wanted[..wanted_bytes], &found[..found_bytes]);
        if wanted != found {
            let same = wanted.iter().zip(found).take_while(|(wanted, found)| wanted == found).count() as u64;
            return Err(differs(
                at + same,
                if same == wanted.len().min(found.len()) as u64 { "an end" } else { "a difference" },
            ));
        }
        if wanted_bytes == 0 {
            return Ok(size);
        }
        at += wanted_bytes as u64;
    }
}

/// Fills `buffer`, or reads to the end of the file.
fn read_full(from: &mut impl Read, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut bytes = 0;
    while bytes < buffer.len() {
        match from.read(&mut buffer[bytes..]) {
            Ok(0) => break,
            Ok(more) => bytes += more,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(bytes)
}
