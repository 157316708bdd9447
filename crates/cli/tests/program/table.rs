//! Tests of `wholemem table`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use wholemem_os::PidFd;
use wholemem_os::pidfd::Signal;

use crate::run::{Run, program, run, timeout};

/// Runs `wholemem table`. An argument `@name` is replaced with the path of the file `name` in `folder`.
fn table(folder: &Path, args: &[&str]) -> Run {
    let paths: Vec<_> = args
        .iter()
        .map(|arg| match arg.strip_prefix("@") {
            Some(name) => folder.join(name).to_str().unwrap().to_owned(),
            None => (*arg).to_owned(),
        })
        .collect();
    let paths: Vec<_> = ["table"].into_iter().chain(paths.iter().map(String::as_str)).collect();
    run(&paths)
}

#[test]
fn rows_are_unchanged_after_import_check_and_export() {
    let folder = tempfile::tempdir().unwrap();
    let rows: Vec<u8> = (0..60_000u32).flat_map(u32::to_le_bytes).collect();
    fs::write(folder.path().join("rows.bin"), &rows).unwrap();
    let import = ["import", "@rows.bin", "@saved", "--dtype", "u32", "--row-shape", "3,4", "--parts", "3"];
    let import = table(folder.path(), &import);
    let expected = format!(
        "{}: saved\n5000 rows of u32, shape 5000 x 3 x 4, 234.4 KiB in 3 files, with checksums\n",
        folder.path().join("saved").display()
    );
    assert_eq!((import.code, &import.stdout, import.stderr.as_str()), (Some(0), &expected, ""));

    let check = table(folder.path(), &["check", "@saved", "--json"]);
    let expected: serde_json::Value = serde_json::from_str(&check.stdout).unwrap();
    assert_eq!(
        (check.code, &expected["done"], &expected["bytes"]),
        (Some(0), &"checked".into(), &240_000.into())
    );

    assert_eq!(table(folder.path(), &["export", "@saved", "@rows.npy"]).code, Some(0));
    let written = fs::read(folder.path().join("rows.npy")).unwrap();
    assert!(written.ends_with(&rows) && written.starts_with(b"\x93NUMPY"));

    // The exported file is a .npy file whatever its extension is.
    let export = table(folder.path(), &["export", "@saved", "@rows"]);
    let expected = format!(
        "{}: written\n5000 rows of u32, shape 5000 x 3 x 4, 234.4 KiB in 1 file\n",
        folder.path().join("rows").display()
    );
    assert_eq!((export.code, export.stdout, export.stderr.as_str()), (Some(0), expected, ""));
    assert_eq!(fs::read(folder.path().join("rows")).unwrap(), written);
}

#[test]
fn errors_of_files_have_hints() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("rows.bin"), [0; 64]).unwrap();
    let unknown = table(folder.path(), &["info", "@rows.bin"]);
    assert_eq!(unknown.code, Some(1));
    assert!(
        unknown.stderr.contains("hint: to read raw bytes, specify the element type and the shape of a row")
    );

    let header = format!("{:<117}\n", "{'descr': '>f4', 'fortran_order': False, 'shape': (16,), }");
    fs::write(
        folder.path().join("rows.npy"),
        [b"\x93NUMPY\x01\x00\x76\x00", header.as_bytes(), &[0; 64]].concat(),
    )
    .unwrap();
    let expected = format!(
        "error: {}: the element type `>f4` of the file is not supported\n\n\
         hint: in numpy, save `array.astype(array.dtype.newbyteorder('<'))`\n",
        folder.path().join("rows.npy").display()
    );
    assert_eq!(table(folder.path(), &["info", "@rows.npy"]).stderr, expected);

    let import = ["import", "@rows.bin", "@saved", "--dtype", "f32", "--row-shape", "4"];
    assert_eq!(table(folder.path(), &import).code, Some(0));
    let again = table(folder.path(), &import);
    let expected = format!(
        "error: {}: cannot save the tensor: the path exists already\n\nhint: enable overwriting, or save to another path\n",
        folder.path().join("saved").display()
    );
    assert_eq!((again.code, again.stderr), (Some(1), expected));
    assert_eq!(table(folder.path(), &[&import[..], &["--overwrite"]].concat()).code, Some(0));

    let shard = folder.path().join("saved").join("00002-of-00004.rows");
    let mut bytes = fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&shard, bytes).unwrap();
    let corrupt = table(folder.path(), &["check", "@saved"]);
    assert_eq!(corrupt.code, Some(1));
    assert!(corrupt.stderr.contains("rows 2..3 of the saved tensor are corrupt"), "{corrupt:?}");
}

fn listed(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

#[test]
fn an_interrupted_import_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let (rows, saved) = (folder.path().join("rows.bin"), folder.path().join("saved"));
    // The imported file is a sparse file of 1 TiB, which takes no disk space. Importing it takes so long that the signal
    // arrives before the end.
    File::create(&rows).unwrap().set_len(1 << 40).unwrap();
    let args = [
        "table",
        "import",
        rows.to_str().unwrap(),
        saved.to_str().unwrap(),
        "--dtype",
        "u8",
        "--row-shape",
        "64",
    ];
    let child = program(&args).spawn().unwrap();
    let process = PidFd::open(child.id()).unwrap();
    // Waits until the import has started: the folder then contains more files than the input.
    while listed(folder.path()).len() == 1 {
        assert!(!process.has_exited().unwrap(), "{:?}", child.wait_with_output());
        std::thread::yield_now();
    }
    process.signal(Signal::INT).unwrap();
    assert!(process.wait_exit(timeout()).unwrap(), "the import continues after SIGINT");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(
        String::from_utf8(output.stderr).unwrap(),
        "error: the save, load, export or check of a tensor was interrupted\n"
    );
    assert_eq!(listed(folder.path()), [rows]);
}
