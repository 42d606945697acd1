//! An HTTP server on localhost that answers as it is told, also badly.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What came in.
#[derive(Clone, Debug)]
pub struct Asked {
    pub path: String,
    /// `name: value`, as sent.
    pub headers: Vec<String>,
}

impl Asked {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then_some(value.trim())
        })
    }

    /// The byte from which a part of the file was asked for.
    pub fn from(&self) -> Option<usize> {
        self.header("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    }
}

/// What goes out.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<String>,
    pub body: Vec<u8>,
    /// Content-Length, if it is not the body's; none for no such header.
    pub length: Option<Option<usize>>,
    /// The connection ends after so many bytes of the body.
    pub cut: Option<usize>,
    /// Before the rest of the body, after `cut` bytes of it, nothing is sent for so long.
    pub stall: Option<Duration>,
}

impl Answer {
    pub fn ok(body: &[u8]) -> Self {
        Self { status: 200, body: body.to_vec(), ..Self::default() }
    }

    pub fn status(status: u16) -> Self {
        Self { status, ..Self::default() }
    }

    pub fn with(mut self, header: &str) -> Self {
        self.headers.push(header.to_owned());
        self
    }

    /// The part of a file that was asked for, or all of it.
    pub fn part(file: &[u8], asked: &Asked) -> Self {
        match asked.from().filter(|from| *from < file.len()) {
            Some(from) => {
                let range = format!("Content-Range: bytes {from}-{}/{}", file.len() - 1, file.len());
                Self { status: 206, ..Self::ok(&file[from..]) }.with(&range)
            }
            None => Self::ok(file),
        }
    }
}

pub struct Server {
    pub address: String,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Server {
    /// Serves for as long as the test's process lives; `answer` gets what was asked and how often something was before.
    pub fn start(answer: impl Fn(&Asked, usize) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (log, answer) = (Arc::clone(&asked), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (log, answer) = (Arc::clone(&log), Arc::clone(&answer));
                std::thread::spawn(move || {
                    let Some(asked) = read(&stream) else { return };
                    let before = {
                        let mut log = log.lock().unwrap();
                        log.push(asked.clone());
                        log.len() - 1
                    };
                    // A client that has seen enough leaves in the middle.
                    let _ = send(stream, &answer(&asked, before));
                });
            }
        });
        Self { address, asked }
    }

    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

fn read(stream: &TcpStream) -> Option<Asked> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let path = lines.next()?.split(' ').nth(1)?.to_owned();
    Some(Asked { path, headers: lines.take_while(|line| !line.is_empty()).collect() })
}

fn send(mut stream: TcpStream, answer: &Answer) -> std::io::Result<()> {
    let mut head = format!("HTTP/1.1 {} Said\r\nConnection: close\r\n", answer.status);
    if let Some(length) = answer.length.unwrap_or(Some(answer.body.len())) {
        head += &format!("Content-Length: {length}\r\n");
    }
    answer.headers.iter().for_each(|header| head += &format!("{header}\r\n"));
    stream.write_all((head + "\r\n").as_bytes())?;
    let (first, rest) = answer.body.split_at(answer.cut.unwrap_or(answer.body.len()).min(answer.body.len()));
    stream.write_all(first)?;
    stream.flush()?;
    if let Some(pause) = answer.stall {
        std::thread::sleep(pause);
        stream.write_all(rest)?;
    }
    Ok(())
}
