//! Tests of the help texts and the version of the program.

use crate::run::run;

#[test]
fn help_lists_all_commands_except_internal_ones() {
    let run = run(&["--help"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    insta::assert_snapshot!(run.stdout, @r"
    One memory over many GPUs, processes and threads

    Usage: wholemem <COMMAND>

    Commands:
      doctor       Try every feature on this machine, and report which work and why others do not
      demo         Demonstrate the features of wholemem, and verify every result
      launch       Run a command as several ranks
      table        Save, check and export tables as files
      serve        Serve a store of named objects, which outlive the processes that created them and a
                   crash of the server
      put          Put a file into a store as an object; a .safetensors file as a pack (several objects
                   in one memory) with an object for each tensor
      get          Write an object of a store to a file
      ls           List the objects of a store
      stat         Show the properties of an object, or the state of a store
      rm           Delete objects of a store; memory is freed when no client holds the object
      watch        Print events of a store: published, replaced and deleted objects
      top          Show the memory, the objects and the requests of a store, and update them
      bench        Run a benchmark that compares wholemem with raw system calls or plain copies
      completions  Print a script with which a shell completes commands and options
      man          Print the manual page of a command, for `man -l -`
      help         Print this message or the help of the given subcommand(s)

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
    Measure the time to allocate memory and send it to a waiting process, which maps it and reads its
    first and last byte

    Usage: wholemem bench share [OPTIONS]

    Options:
          --backend <BACKEND>    Memory to use: GPU or host [default: auto] [possible values: auto,
                                 host, cuda]
          --sizes <SIZES>        Memory sizes to measure, such as `64KiB,1MiB` [default: from one
                                 granule up to --max-size, by factors of four]
          --max-size <MAX_SIZE>  Largest memory size to measure [default: a third of the available
                                 memory, or what can be measured within a minute]
          --any-core             Do not pin both processes to one core
          --rounds <ROUNDS>      Timed rounds for each memory size [default: as many as fit in four
                                 seconds, between 7 and 400]
          --json                 Print one JSON object instead of a table
      -h, --help                 Print help (see more with '--help')
    ");
}

#[test]
fn help_of_bench_gather() {
    let run = run(&["bench", "gather", "-h"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    insta::assert_snapshot!(run.stdout, @r#"
    Measure gathering rows of a table by index, compared with a plain copy of as many bytes

    Usage: wholemem bench gather [OPTIONS]

    Options:
          --backend <BACKEND>     Memory to use: GPU or host [default: auto] [possible values: auto,
                                  host, cuda]
          --row-bytes <SIZES>     Row lengths of the tables to measure [default:
                                  4,8,12,16,32,64,100,128,130,256,512,1KiB,2KiB,4KiB,8KiB]
          --index <TYPES>         Integer types of the row indices [default: i64] [possible values: i32,
                                  i64]
          --spread <SPREADS>      Distributions of the random row indices [default: uniform] [possible
                                  values: uniform, zipf]
          --kind <KINDS>          Layout of the table in each rank's address space [default: continuous]
                                  [possible values: continuous, chunked]
          --location <LOCATIONS>  Memory in which the table is stored [default: device] [possible
                                  values: device, host]
          --ranks <COUNTS>        Numbers of ranks to measure [default: 1]
          --share <SHARES>        How the table is divided among the ranks [default: even] [possible
                                  values: even, uneven, first, last]
          --first-only            Only rank 0 gathers or scatters rows; the other ranks only store a
                                  part of the table
          --table <TABLE>         Length of the table, such as `4GiB` [default: 16GiB on a GPU, 4GiB on
                                  a host, or less if memory is short]
          --rows <COUNTS>         Rows in each gather or scatter call, such as `1,10,100` [default: as
                                  many as have 2GiB on a GPU or 64MiB on a host, but at most 32 or 4
                                  million]
          --calls <CALLS>         Consecutive calls that are timed together as one round [default: as
                                  many as move 8MiB, at least one]
          --rounds <ROUNDS>       Timed rounds for each combination of options [default: 15]
          --in-turns              Alternate with another program: before each round print `"ready"` and
                                  wait for a line on stdin, then print the times
          --json                  Print one JSON object instead of a table
      -h, --help                  Print help (see more with '--help')
    "#);
}

#[test]
fn help_of_bench_allreduce() {
    let run = run(&["bench", "allreduce", "-h"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    insta::assert_snapshot!(run.stdout, @r"
    Measure all-reduce, compared with a flag's round trip and a plain copy

    Usage: wholemem bench allreduce [OPTIONS]

    Options:
          --backend <BACKEND>       Memory to use: GPU or host [default: auto] [possible values: auto,
                                    host, cuda]
          --ranks <COUNTS>          Numbers of ranks to measure [default: 2,3,4,8]
          --mode <MODES>            How collective calls are enqueued [default: eager on a host, both on
                                    a GPU] [possible values: eager, graph]
          --any-core                Do not pin each rank to its own core
          --calls <CALLS>           Consecutive calls that are timed together as one round [default: as
                                    many as take about a millisecond, 100 on a GPU]
          --rounds <ROUNDS>         Timed rounds for each combination of options [default: 15]
          --json                    Print one JSON object instead of a table
          --sizes <SIZES>           Lengths of each rank's input [default: from 8B to 64MiB, on a GPU to
                                    256MiB, or less if memory is short]
          --buffers <BUFFERS>       Kinds of memory that hold inputs and outputs [default:
                                    window,staged] [possible values: window, staged, registered]
          --algorithm <ALGORITHMS>  Collective algorithms to force where they are supported [default:
                                    chosen by wholemem] [possible values: packets, one-shot, two-shot]
          --place <PLACES>          Whether the output is another buffer or the input buffer [default:
                                    out,in] [possible values: out, in]
          --dtype <TYPES>           Types of the elements to reduce [default: f32 on a host, bf16 on a
                                    GPU]
          --op <OPS>                Reduction operations that combine elements [default: sum]
          --tune                    Measure every algorithm at every size, and print the sizes up to
                                    which each algorithm should be used
      -h, --help                    Print help (see more with '--help')
    ");
}

#[test]
fn help_of_demo() {
    let run = run(&["demo", "-h"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    insta::assert_snapshot!(run.stdout, @r"
    Demonstrate the features of wholemem, and verify every result

    Usage: wholemem demo [OPTIONS]

    Options:
          --backend <BACKEND>  Memory to use: GPU or host [default: auto] [possible values: auto, host,
                               cuda]
          --size <SIZE>        Size of the shared memory, such as `64KiB` or `1.5GiB` [default: 256MiB]
          --seed <SEED>        Seed of the test data, to repeat a run [default: a random seed, which is
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
