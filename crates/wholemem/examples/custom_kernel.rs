//! A user's kernel over a chunked table: each node of a graph sums the rows of its neighbours.
//!
//! The kernel is `kernels/sample.cu`, written with `PtrGen` of `wholemem/ptr_gen.cuh` and compiled to PTX. The same kernel in Rust
//! for the host backend is below. Both get the table as an [`ElementRef`], from which they compute the address of any row and
//! element.

#![allow(unsafe_code, reason = "loading and launching a kernel is unsafe")]
#![expect(clippy::print_stdout, reason = "an example prints its results")]

use wholemem::{
    Args, Backend, Communicator, Deadline, Dtype, ElementRef, GlobalRef, KernelImage, Kind, LaunchShape,
    Module, PinnedBuffer, TensorSpec, WholeTensor,
};

const IMAGE: KernelImage = KernelImage {
    ptx: Some(include_str!("../kernels/ptx/sample.ptx")),
    host: &[("sum_neighbours_chunked", sum_neighbours)],
};

const NODES: usize = 3;
const BLOCKS: u32 = 3;
const WIDTH: usize = 4;

fn main() -> wholemem::Result<()> {
    // Four ranks share a device, and have 10, 0, 1 and 9 rows of the table.
    let device = Backend::auto()?.device(0)?;
    let comms = Communicator::local(&vec![device.clone(); 4])?;
    let spec = TensorSpec {
        kind: Kind::Chunked,
        rows_of_each: Some(vec![10, 0, 1, 9]),
        ..TensorSpec::new(Dtype::F32, &[20, WIDTH as u64])
    };
    let tables = Communicator::on_each(&comms, |comm| WholeTensor::create(comm, &spec))?;
    let table = &tables[0];
    let stream = device.stream()?;
    // All elements of row `n` have the value `n`.
    let rows: Vec<f32> = (0..20_u8).flat_map(|row| [f32::from(row); WIDTH]).collect();
    table.write_rows(0, &rows)?;

    // In the graph, node 0 has the neighbours 1, 10 and 19, node 1 has none, and node 2 has neighbour 11 twice.
    let (starts, neighbours) = ([0_u64, 3, 3, 5], [1_u64, 10, 19, 11, 11]);
    let bytes = |words: &[u64]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
    let upload = |bytes: &[u8]| -> wholemem::Result<PinnedBuffer> {
        let buffer = PinnedBuffer::create(&device, bytes.len())?;
        stream.write(&buffer.all(), bytes)?;
        Ok(buffer)
    };
    let (starts, neighbours) = (upload(&bytes(&starts))?, upload(&bytes(&neighbours))?);
    let sums = upload(&[0; NODES * WIDTH * 4])?;

    // SAFETY: the image has one function, `sum_neighbours_chunked`, which is launched below with the arguments that it takes.
    let module = unsafe { Module::load(&device, &IMAGE) }?;
    let kernel = module.function("sum_neighbours_chunked")?;
    let args = Args::new()
        .value(&table.element_ref())
        .u64(WIDTH as u64)
        .u64(starts.all().address())
        .u64(neighbours.all().address())
        .u64(NODES as u64)
        .u64(sums.all().address());
    let operands = [starts.all(), neighbours.all(), sums.all()];
    // SAFETY: `args` are the arguments of `sum_neighbours_chunked`. They refer to the operands and to the table, which outlives
    // the launch. All neighbours are rows of the table, and the last start is the number of neighbours.
    unsafe { stream.launch(&kernel, &LaunchShape::linear(BLOCKS, 32), &args, &operands) }?;
    stream.synchronize(Deadline::NEVER)?;

    let mut seen = [0; NODES * WIDTH * 4];
    stream.read(&sums.all(), &mut seen)?;
    let (elements, _) = seen.as_chunks::<4>();
    let elements: Vec<_> = elements.iter().map(|element| f32::from_ne_bytes(*element)).collect();
    for (node, sum) in elements.chunks_exact(WIDTH).enumerate() {
        println!("node {node}: {sum:?}");
    }
    Ok(())
}

/// Sums the rows of each node's neighbours. This is `sum_neighbours_chunked` for the CPU, where one call does the work of the
/// whole grid.
///
/// # Safety
/// The arguments are those of the kernel, and all addresses are mapped.
unsafe fn sum_neighbours(_: &LaunchShape, args: &Args) {
    let number = |index| args.read_u64(index).expect("the argument has eight bytes");
    let table = args.read_value::<ElementRef>(0).expect("the first argument is a table").rows;
    let (width, nodes) = (number(1), number(4));
    let (starts, neighbours, sums) = (number(2), number(3), number(5));
    for node in 0..nodes {
        for column in 0..width {
            let mut sum = 0.0;
            // SAFETY: `starts` has an element for each node, and one after the last.
            let [first, end] = [node, node + 1].map(|node| unsafe { load::<u64>(starts, node) });
            for edge in first..end {
                // SAFETY: `edge` is below the last start, which is the number of neighbours.
                let neighbour = unsafe { load(neighbours, edge) };
                // SAFETY: every neighbour is a row of the table, whose directory is mapped.
                let row = unsafe { row_address(&table, neighbour) };
                // SAFETY: `column` is below `width`, the number of elements in a row.
                sum += unsafe { load::<f32>(row, column) };
            }
            let place = std::ptr::with_exposed_provenance_mut::<f32>(address(sums, node * width + column, 4));
            // SAFETY: `sums` has `width` elements for each node.
            unsafe { place.write(sum) };
        }
    }
}

/// Returns the address of a row of a chunked table.
///
/// # Safety
/// `row` is a row of the table, and the table's directory is mapped.
unsafe fn row_address(table: &GlobalRef, row: u64) -> u64 {
    let chunks = u64::from(table.chunks);
    // SAFETY: in the table's directory, the first row of each chunk and the number of rows follow the addresses of the chunks.
    let starts: Vec<u64> = (0..=chunks).map(|chunk| unsafe { load(table.base, chunks + chunk) }).collect();
    let (chunk, row) = table.locate(row + table.first_row, &starts);
    // SAFETY: `chunk` is a chunk of the table, so the directory has its address.
    let base: u64 = unsafe { load(table.base, chunk as u64) };
    base + table.offset + row * table.stride
}

/// Loads one element of an array.
///
/// # Safety
/// The element is mapped, and is a valid `T`.
unsafe fn load<T: Copy>(array: u64, index: u64) -> T {
    let place = std::ptr::with_exposed_provenance::<T>(address(array, index, size_of::<T>()));
    // SAFETY: the caller of `load` guarantees that the element at `index` is mapped and is a valid `T`.
    unsafe { place.read() }
}

fn address(array: u64, index: u64, len: usize) -> usize {
    usize::try_from(array).expect("an address is a `usize`")
        + usize::try_from(index).expect("an index is a `usize`") * len
}
