//! A user's program, which `try` builds from the packed crates: it uses each feature of the crate pelton once. Its
//! argument is an empty directory.

use pelton::encoded::{Decode as _, SendEncoded as _};
use pelton::file::{Engine, Open, Operation};
use pelton::tokio::{AsyncReceiver, AsyncSender};
use pelton::values::{SendValue as _, View as _};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let directory = std::path::PathBuf::from(std::env::args_os().nth(1).ok_or("the argument DIRECTORY is missing")?);
    let name = format!("unix:{}", directory.join("socket").display());

    // Messages, kept in a directory.
    let channel = directory.join("channel");
    let mut sender = pelton::Options::new().create_sender(&channel)?;
    sender.send(b"kept")?;
    let mut receiver = pelton::Options::new().create_receiver(&channel)?;
    assert_eq!(&*receiver.receive()?, b"kept");

    // Calls.
    let mut service = pelton::Service::listen(&name)?;
    std::thread::spawn(move || {
        service.run(1, |request| {
            let length = request.len().to_le_bytes();
            let _ = request.reply(&length);
        })
    });
    let mut client = pelton::Client::connect(&name)?;
    assert_eq!(client.call(b"12345")?.ok()?.to_vec(), 5_usize.to_le_bytes());

    // Files.
    let mut engine = Engine::new()?;
    let file = engine.run(Operation::open(directory.join("file"), Open::for_both().create(0o600)))?.into_file()?;
    engine.run(Operation::write_at(&file, "written", 0))?;
    assert_eq!(engine.run(Operation::read_at(&file, vec![0; 7], 0))?.bytes(), b"written");

    // Values.
    let (mut sender, mut receiver) = pelton::Options::new().threads()?;
    sender.send_encoded(&("encoded", 1_u64))?;
    assert_eq!(receiver.receive()?.decode::<(String, u64)>()?, ("encoded".to_owned(), 1));
    sender.send_value(&[7_u64, 8])?;
    assert_eq!(receiver.receive()?.view::<[u64; 2]>()?, &[7, 8]);

    // Tokio.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    runtime.block_on(async {
        let mut sender = AsyncSender::new(sender)?;
        let mut receiver = AsyncReceiver::new(receiver)?;
        sender.send(b"awaited").await?;
        assert_eq!(&*receiver.receive().await?, b"awaited");
        Ok::<(), pelton::Error>(())
    })?;

    println!("all is as it must be");
    Ok(())
}
