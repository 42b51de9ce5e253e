//! A static program of Rust that returns what it gets: `exchange serve PORT copy|read`, a thread a connection.
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};

fn give_back(mut from: TcpStream, copies: bool) -> std::io::Result<()> {
    let mut to = from.try_clone()?;
    if copies {
        std::io::copy(&mut from, &mut to)?; // splice, by a pipe
    } else {
        let mut room = vec![0u8; 30_011];
        loop {
            let count = from.read(&mut room)?;
            if count == 0 {
                break;
            }
            to.write_all(&room[..count])?;
        }
    }
    to.shutdown(Shutdown::Write)
}

fn main() -> std::io::Result<()> {
    let argv: Vec<String> = std::env::args().collect();
    let port: u16 = argv[2].parse().expect("a port");
    let listener = TcpListener::bind(("127.0.0.1", port))?;
    println!("ready");
    for stream in listener.incoming() {
        let (stream, copies) = (stream?, argv[3] == "copy");
        std::thread::spawn(move || give_back(stream, copies).expect("the connection"));
    }
    Ok(())
}
