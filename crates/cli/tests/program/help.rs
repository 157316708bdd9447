//! Help texts and version of the program.

use crate::run::run;

#[test]
fn help_lists_all_commands_except_internal_ones() {
    let run = run(&["--help"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    insta::assert_snapshot!(run.stdout, @r"
    One memory over many GPUs, processes and threads

    Usage: wholemem <COMMAND>

    Commands:
      doctor  Say what this machine can do, each thing tried, with the reason where not
      demo    Take a tour that checks its own results
      launch  Run a command as several ranks
      table   Save, check and export tables of rows as files
      serve   Serve a store of named objects, which outlive whoever made them, and this server
      put     Put a file into a store, as an object; a .safetensors file as a pack, with an object for
              each tensor
      get     Write an object of a store to a file
      ls      List the objects of a store
      stat    Say what there is to know of an object, or of a store
      rm      Delete objects of a store: their memory goes with the last who holds them
      watch   Tell what happens in a store, as it happens
      bench   Measure, beside the same system calls made raw

    Options:
      -h, --help     Print help
      -V, --version  Print version
    ");
}

#[test]
fn help_of_bench_share() {
    let run = run(&["bench", "share", "-h"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    insta::assert_snapshot!(run.stdout, @r"
    Creating memory and passing it to a waiting process, which maps it and reads its first and last byte

    Usage: wholemem bench share [OPTIONS]

    Options:
          --backend <BACKEND>    Which machinery moves the bytes [default: auto] [possible values: auto,
                                 host, cuda]
          --sizes <SIZES>        Exactly these sizes, such as `64KiB,1MiB` [default: from one granule up
                                 to --max-size, by factors of four]
          --max-size <MAX_SIZE>  The largest size [default: a third of the memory that is free, or what
                                 can be measured within a minute]
          --any-core             Let the processes run on any core, instead of both on one: for machines
                                 with cores to spare
          --rounds <ROUNDS>      How often to measure each size [default: what four seconds allow,
                                 between 7 and 400]
          --json                 Print one JSON object instead of a table
      -h, --help                 Print help (see more with '--help')
    ");
}

#[test]
fn help_of_bench_gather() {
    let run = run(&["bench", "gather", "-h"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    insta::assert_snapshot!(run.stdout, @r#"
    Gathering rows of a table by their indices, beside a plain copy of as many bytes

    Usage: wholemem bench gather [OPTIONS]

    Options:
          --backend <BACKEND>     Which machinery moves the bytes [default: auto] [possible values:
                                  auto, host, cuda]
          --row-bytes <SIZES>     How long a row is [default:
                                  4,8,12,16,32,64,100,128,130,256,512,1KiB,2KiB,4KiB,8KiB]
          --index <TYPES>         The type of the indices [default: i64] [possible values: i32, i64]
          --spread <SPREADS>      Which rows are asked for [default: uniform] [possible values: uniform,
                                  zipf]
          --kind <KINDS>          How ranks see the table [default: continuous] [possible values:
                                  continuous, chunked]
          --location <LOCATIONS>  Where the table is [default: device] [possible values: device, host]
          --ranks <COUNTS>        How many ranks [default: 1]
          --share <SHARES>        Which rank has how much of the table [default: even] [possible values:
                                  even, uneven, first, last]
          --first-only            Only rank 0 moves rows; the others have their part of the table, and
                                  wait
          --table <TABLE>         How long the table is, such as `4GiB` [default: 16GiB on a GPU, 4GiB
                                  on a host, or what leaves enough free]
          --rows <COUNTS>         How many rows a call moves, such as `1,10,100` [default: what is 2GiB
                                  on a GPU, and 64MiB on a host, and 32 or 4 million at most]
          --calls <CALLS>         How many calls are timed together [default: as many as move 8MiB, and
                                  one if it moves more]
          --rounds <ROUNDS>       How often to measure each [default: 15]
          --in-turns              Take turns with another program: say `"ready"`, wait for a line on
                                  stdin before each round, and print its times
          --json                  Print one JSON object instead of a table
      -h, --help                  Print help (see more with '--help')
    "#);
}

#[test]
fn help_of_bench_allreduce() {
    let run = run(&["bench", "allreduce", "-h"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    insta::assert_snapshot!(run.stdout, @r"
    Reducing the elements of all ranks, beside a flag's round trip and a plain copy

    Usage: wholemem bench allreduce [OPTIONS]

    Options:
          --backend <BACKEND>       Which machinery moves the bytes [default: auto] [possible values:
                                    auto, host, cuda]
          --ranks <COUNTS>          How many ranks [default: 2,3,4,8]
          --mode <MODES>            How calls are enqueued [default: eager on a host, and both on a GPU]
                                    [possible values: eager, graph]
          --any-core                Let ranks run on any core, instead of each on its own where there
                                    are enough
          --calls <CALLS>           How many calls are timed together [default: as many as take about a
                                    millisecond, and 100 on a GPU]
          --rounds <ROUNDS>         How often to measure each [default: 15]
          --json                    Print one JSON object instead of a table
          --sizes <SIZES>           How many bytes each rank brings along [default: from 8B to 64MiB, on
                                    a GPU to 256MiB, or what leaves enough free]
          --buffers <BUFFERS>       Where inputs and outputs are [default: window,staged] [possible
                                    values: window, staged]
          --algorithm <ALGORITHMS>  How it is done, wherever it can be done so [default: as the library
                                    chooses] [possible values: packets, one-shot, two-shot]
          --place <PLACES>          Whether the output is where the input is [default: out,in] [possible
                                    values: out, in]
          --dtype <TYPES>           The type of the elements [default: f32 on a host, bf16 on a GPU]
          --op <OPS>                How elements become one [default: sum]
          --tune                    Measure every algorithm at every size, and print the table of which
                                    is best up to where
      -h, --help                    Print help (see more with '--help')
    ");
}

#[test]
fn help_of_demo() {
    let run = run(&["demo", "-h"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    insta::assert_snapshot!(run.stdout, @r"
    Take a tour that checks its own results

    Usage: wholemem demo [OPTIONS]

    Options:
          --backend <BACKEND>  Which machinery moves the bytes [default: auto] [possible values: auto,
                               host, cuda]
          --size <SIZE>        How much memory to share, such as `64KiB` or `1.5GiB` [default: 256MiB]
          --seed <SEED>        The seed of the bytes, to repeat a run [default: a random one, which is
                               printed]
          --json               Print one JSON object instead of a table
      -h, --help               Print help (see more with '--help')
    ");
}

#[test]
fn the_version_is_that_of_the_package() {
    let run = run(&["--version"]);
    assert_eq!(run.code, Some(0));
    assert_eq!(run.stdout, concat!("wholemem ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn a_missing_command_is_an_error_that_prints_the_help() {
    let alone = run(&[]);
    assert_eq!((alone.code, alone.stdout.as_str()), (Some(2), ""));
    assert_eq!(alone.stderr, run(&["--help"]).stdout);
}
