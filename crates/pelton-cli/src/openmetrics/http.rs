//! Serves texts by HTTP to whatever scrapes it: a few connections side by side in this thread, each with a deadline,
//! each for one request.

use super::Format;
use crate::{failure::Failure, signals::Signals};
use rustix::event::PollFlags;
use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

/// How long a client may take for its request and the response. A guess: a scrape has 10 s by default.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);
/// Clients at a time; a further one takes the place of the oldest, so that silent clients keep nobody waiting.
const CLIENTS_MAX: usize = 32;
/// The largest request. It has no body.
const REQUEST_BYTES_MAX: usize = 8 << 10;
/// Headers of a request.
const HEADERS_MAX: usize = 64;

struct Client {
    stream: TcpStream,
    until: Instant,
    request: Vec<u8>,
    /// The bytes of the response that are not written yet, once the request is read.
    response: Option<Vec<u8>>,
}

/// Listens for clients; `option` has the address.
pub fn listen(option: &str, address: SocketAddr) -> Result<TcpListener, Failure> {
    TcpListener::bind(address).map_err(|error| match error.kind() {
        ErrorKind::AddrInUse | ErrorKind::AddrNotAvailable | ErrorKind::PermissionDenied => {
            Failure::Refused(format!("{option} {address}: {error}: choose another address or port"))
        }
        _ => Failure::system(format!("listening at {address}"), error),
    })
}

/// The status and the text of a path, if there is such a path. The format is the one that the client wants of metrics.
pub type Page = Option<(&'static str, String)>;

/// Serves until a signal, which is the result. `page` makes the text of each path; `/metrics` is one.
pub fn serve(
    listener: &TcpListener,
    signals: &Signals,
    mut page: impl FnMut(&str, Format) -> Page,
) -> Result<(), Failure> {
    listener.set_nonblocking(true).map_err(|error| Failure::system("the listening socket", error))?;
    let mut clients: Vec<Client> = Vec::new();
    loop {
        let now = Instant::now();
        clients.retain(|client| client.until > now);
        let timeout = clients.iter().map(|client| client.until - now).min();
        let waits = clients.iter().map(|client| {
            let events = if client.response.is_some() { PollFlags::OUT } else { PollFlags::IN };
            (client.stream.as_fd(), events)
        });
        let ready = signals.poll_all([(listener.as_fd(), PollFlags::IN)].into_iter().chain(waits), timeout)?;
        let mut is_ready = ready[1..].iter();
        clients.retain_mut(|client| !is_ready.next().expect("one for each") || client.go_on(&mut page));
        if ready[0] {
            // A client that has left in the meantime, or too few descriptors: the next round tries again.
            match listener.accept() {
                Ok((stream, _)) if stream.set_nonblocking(true).is_ok() => {
                    if clients.len() == CLIENTS_MAX {
                        clients.remove(0);
                    }
                    let until = Instant::now() + CLIENT_TIMEOUT;
                    clients.push(Client { stream, until, request: Vec::new(), response: None });
                }
                Err(error) if error.kind() != ErrorKind::WouldBlock => {
                    signals.poll([], Some(Duration::from_millis(50)))?;
                }
                _ => {}
            }
        }
    }
}

impl Client {
    /// Reads or writes what is possible now. Returns whether there is more to do.
    fn go_on(&mut self, page: &mut impl FnMut(&str, Format) -> Page) -> bool {
        let done = match self.response {
            None => self.read(page),
            Some(_) => self.write(),
        };
        match done {
            Ok(has_more) => has_more,
            Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }

    fn read(&mut self, page: &mut impl FnMut(&str, Format) -> Page) -> std::io::Result<bool> {
        let mut bytes = [0; 4096];
        let read = self.stream.read(&mut bytes)?;
        self.request.extend_from_slice(&bytes[..read]);
        match respond(&self.request, page) {
            Some(response) => self.response = Some(response),
            None => return Ok(read > 0),
        }
        self.write()
    }

    fn write(&mut self) -> std::io::Result<bool> {
        let Some(response) = &mut self.response else { return Ok(false) };
        while !response.is_empty() {
            let written = self.stream.write(response)?;
            response.drain(..written);
        }
        self.stream.shutdown(std::net::Shutdown::Write)?;
        Ok(false)
    }
}

/// The response to a request, once it is complete.
fn respond(request: &[u8], page: &mut impl FnMut(&str, Format) -> Page) -> Option<Vec<u8>> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Request::new(&mut headers);
    let plain = "text/plain; charset=utf-8";
    match parsed.parse(request) {
        Ok(httparse::Status::Partial) if request.len() < REQUEST_BYTES_MAX => return None,
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            return Some(response("431 Request Header Fields Too Large", plain, "the request is too long\n", true));
        }
        Err(_) => return Some(response("400 Bad Request", plain, "this is no HTTP request\n", true)),
    }
    let path = parsed.path.unwrap_or_default().split('?').next().unwrap_or_default();
    let with_body = parsed.method != Some("HEAD");
    if !matches!(parsed.method, Some("GET" | "HEAD")) {
        return Some(response("405 Method Not Allowed", plain, "GET /metrics\n", true));
    }
    let takes_openmetrics = parsed.headers.iter().any(|header| {
        header.name.eq_ignore_ascii_case("accept")
            && String::from_utf8_lossy(header.value).contains("application/openmetrics-text")
    });
    let (format, kind) = match (path, takes_openmetrics) {
        ("/metrics", true) => (Format::Openmetrics, "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        ("/metrics", false) => (Format::Text, "text/plain; version=0.0.4; charset=utf-8"),
        _ => (Format::Text, plain),
    };
    Some(match page(path, format) {
        Some((status, text)) => response(status, kind, &text, with_body),
        None => response("404 Not Found", plain, "the metrics are at /metrics\n", with_body),
    })
}

fn response(status: &str, kind: &str, body: &str, with_body: bool) -> Vec<u8> {
    let allow = if status.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n{allow}Connection: close\r\n\r\n",
        body.len()
    );
    format!("{head}{}", if with_body { body } else { "" }).into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silent_clients_keep_nobody_waiting() {
        let listener = listen("--metrics", "127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        // It ends with the test's process.
        std::thread::spawn(move || serve(&listener, &Signals::none().unwrap(), |_, _| Some(("200 OK", String::new()))));
        let mut silent: Vec<TcpStream> = (0..CLIENTS_MAX).map(|_| TcpStream::connect(address).unwrap()).collect();
        let mut client = TcpStream::connect(address).unwrap();
        client.write_all(b"GET /health HTTP/1.0\r\n\r\n").unwrap();
        let mut response = String::new();
        client.read_to_string(&mut response).unwrap();
        assert!(response.contains("200 OK"), "{response}");
        // The oldest one had to go, the newest one is still there.
        assert_eq!(silent[0].read(&mut [0]).unwrap(), 0);
        silent[CLIENTS_MAX - 1].set_nonblocking(true).unwrap();
        assert_eq!(silent[CLIENTS_MAX - 1].read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    }

    #[test]
    fn requests_get_their_status_and_format() {
        let answer = |request: &str| {
            let response = respond(request.as_bytes(), &mut |path, format| {
                (path == "/metrics").then(|| ("200 OK", format!("{format:?}\n")))
            })?;
            let text = String::from_utf8(response).unwrap();
            let (head, body) = text.split_once("\r\n\r\n").unwrap();
            Some((head[9..12].to_owned(), body.to_owned()))
        };
        let some = |status: &str, body: &str| Some((status.to_owned(), body.to_owned()));
        assert_eq!(answer("GET /metrics HTTP/1.1\r\n"), None);
        assert_eq!(answer("GET /metrics HTTP/1.1\r\n\r\n"), some("200", "Text\n"));
        let accept = "ACCEPT: application/openmetrics-text;version=1.0.0,text/plain;q=0.5";
        assert_eq!(answer(&format!("GET /metrics?a=b HTTP/1.1\r\n{accept}\r\n\r\n")), some("200", "Openmetrics\n"));
        assert_eq!(answer("HEAD /metrics HTTP/1.1\r\n\r\n"), some("200", ""));
        assert_eq!(answer("GET / HTTP/1.1\r\n\r\n").unwrap().0, "404");
        assert_eq!(answer("POST /metrics HTTP/1.1\r\n\r\n").unwrap().0, "405");
        assert_eq!(answer("no HTTP at all\r\n\r\n").unwrap().0, "400");
        assert_eq!(answer(&format!("GET /{} HTTP/1.1\r\n", "x".repeat(9000))).unwrap().0, "431");
    }
}
