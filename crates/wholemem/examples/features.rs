//! Loads a table of features from a file. Each rank reads its own rows, and gathers rows of all ranks.

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;
use std::fs;
use std::path::Path;

use wholemem::files::{FileSource, LoadSpec, SaveSpec, ignore_progress};
use wholemem::{bf16, prelude::*};

const NODES: usize = 2000;
const WIDTH: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let (array, saved) = (folder.path().join("features.npy"), folder.path().join("features"));
    write_npy(&array)?;

    let device = Backend::auto()?.device(0)?;
    let three = Communicator::local(&[device.clone(), device.clone(), device.clone()])?;
    let tables = Communicator::on_each(&three, |comm| {
        WholeTensor::load(comm, &FileSource::new(&array), &LoadSpec::default(), &ignore_progress)
    })?;
    println!("3 ranks loaded {} features of shape {:?}", tables[0].dtype(), tables[0].shape());

    // A model would gather a batch of nodes like this: in half precision, on a stream, to memory that a GPU can access.
    let nodes = [1999_i64, 0, 42];
    let stream = device.stream()?;
    let (at, batch) = (PinnedBuffer::create(&device, 24)?, PinnedBuffer::create(&device, 3 * WIDTH * 2)?);
    at.bytes()?.write_at(0, nodes.map(i64::to_ne_bytes).as_flattened())?;
    let output = RowBuffer::new(batch.all(), Dtype::Bf16).converted();
    tables[1].gather_on_sync(&stream, &Indices::i64(at.all()), &output)?;
    let mut bytes = [0; 3 * WIDTH * 2];
    batch.bytes()?.read_at(0, &mut bytes)?;
    let (elements, _) = bytes.as_chunks::<2>();
    let firsts: Vec<_> =
        elements.iter().step_by(WIDTH).map(|element| bf16::from_ne_bytes(*element)).collect();
    println!("the first features of nodes {nodes:?} are {firsts:?}");

    // The ranks save the table, one file for each rank, with checksums. Another number of ranks loads the files.
    Communicator::on_each(&three, |comm| {
        tables[comm.rank().0 as usize].save(&saved, SaveSpec::default(), &ignore_progress)
    })?;
    let two = Communicator::local(&[device.clone(), device])?;
    let again = Communicator::on_each(&two, |comm| {
        WholeTensor::load(comm, &FileSource::new(&saved), &LoadSpec::default(), &ignore_progress)
    })?;
    let features = again[0].read_rows::<f32>(1999..2000)?;
    println!("2 ranks loaded them again, and node 1999 has {features:?}");
    Ok(())
}

/// Writes an array as `numpy.save` does: feature `column` of `node` is `node + column / 8`.
fn write_npy(path: &Path) -> std::io::Result<()> {
    let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({NODES}, {WIDTH}), }}");
    // The .npy header and the ten bytes before it have a multiple of 64 bytes, and end with a newline.
    let header = format!("{header:<117}\n");
    let features =
        (0..NODES).flat_map(|node| (0..WIDTH).map(move |column| node as f32 + column as f32 / 8.0));
    let features: Vec<u8> = features.flat_map(f32::to_le_bytes).collect();
    fs::write(path, [b"\x93NUMPY\x01\x00\x76\x00", header.as_bytes(), &features].concat())
}
