//! Drivers that are missing, old, hidden or strange, and things that are not theirs: each has its error, and a hint where
//! something can be done.

use std::process::Command;

use wholemem_hal::{
    Allocation, AllocationSpec, Attempt, Backend, BackendKind, Capability, Cause, DeviceId, DriverCode,
    Error, HandleKind, KernelImage, Module, PlainBuffer, Rights, ShareHandle,
};
use wholemem_testkit::{FakeCuda, Ranks, cuda, in_forked_child, skipped, test_name};

const STEP: usize = 2 << 20;

const UNAVAILABLE: Option<&str> =
    Some("`wholemem doctor` says what was tried; the host backend works without a GPU");

/// Runs `body` in a process of its own, over the fake driver with these settings.
fn over_fake(test: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    if Ranks::is_rank() {
        return Ranks::of(1).run(test, |_| body());
    }
    let Some(fake) = FakeCuda::install() else { return };
    over(&fake, test, settings, body);
}

/// Runs `body` in a process of its own, over what was installed as the driver.
fn over(fake: &FakeCuda, test: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    let set = |ranks: Ranks, (name, value): &(&str, &str)| {
        ranks.env(format!("WHOLEMEM_FAKE_CUDA_{name}"), value.to_owned())
    };
    settings.iter().fold(fake.ranks(1), set).run(test, |_| body());
}

/// Why there is no CUDA here.
fn reason() -> String {
    let error = Backend::open(BackendKind::Cuda).unwrap_err();
    assert_eq!(error.hint(), UNAVAILABLE);
    assert_eq!(Backend::open(BackendKind::Cuda).unwrap_err(), error, "and it stays so");
    let Error::Unavailable { backend: BackendKind::Cuda, reason } = error else { panic!("{error:?}") };
    reason
}

fn driver_said(call: &'static str, code: u32) -> Cause {
    Cause::Driver { call, code: DriverCode(code) }
}

#[test]
fn no_library() {
    let body = || match Backend::open(BackendKind::Cuda) {
        Ok(_) => skipped("this machine has a driver"),
        Err(_) => assert_eq!(
            reason(),
            "no NVIDIA driver was found \
             (libcuda.so.1: cannot open shared object file: No such file or directory)"
        ),
    };
    if Ranks::is_rank() {
        return Ranks::of(1).run(test_name!(), |_| body());
    }
    over(&FakeCuda::around(|_| {}), test_name!(), &[], body);
}

#[test]
fn a_library_that_is_none() {
    let body = || {
        let reason = reason();
        assert!(reason.starts_with("no NVIDIA driver was found ("), "{reason}");
        assert!(reason.ends_with("libcuda.so.1: file too short)"), "{reason}");
    };
    if Ranks::is_rank() {
        return Ranks::of(1).run(test_name!(), |_| body());
    }
    over(&FakeCuda::around(|place| std::fs::write(place, "hello").unwrap()), test_name!(), &[], body);
}

#[test]
fn a_library_without_the_loader() {
    let body = || assert_eq!(reason(), lacks("cuGetProcAddress_v2"));
    if Ranks::is_rank() {
        return Ranks::of(1).run(test_name!(), |_| body());
    }
    let mut compiled = false;
    let empty = FakeCuda::around(|place| {
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-x", "c", "/dev/null", "-o"]).arg(place);
        compiled = compiler.status().is_ok_and(|status| status.success());
    });
    if !compiled {
        return skipped("there is no C compiler");
    }
    over(&empty, test_name!(), &[], body);
}

fn lacks(function: &str) -> String {
    format!("`libcuda.so.1` has no `{function}`: the driver is older than 550")
}

#[test]
fn a_library_whose_loader_finds_nothing() {
    over_fake(test_name!(), &[("NO_LOADER", "1")], || assert_eq!(reason(), lacks("cuInit")));
}

#[test]
fn a_library_without_a_function_that_is_needed() {
    over_fake(test_name!(), &[("MISSING", "cuMemCreate")], || assert_eq!(reason(), lacks("cuMemCreate")));
}

#[test]
fn a_library_without_functions_that_are_not_needed() {
    let missing = "cuMemGetHandleForAddressRange,cuMulticastCreate";
    over_fake(test_name!(), &[("MISSING", missing)], || {
        let device = cuda::backend().unwrap().device(0).unwrap();
        let refused = |capability, reason| Error::Unsupported { capability, device: device.label(), reason };
        let dma_buf = refused(Capability::DmaBuf, "the driver has no `cuMemGetHandleForAddressRange`");
        let map = device.allocate(STEP).unwrap().map(Rights::Read).unwrap();
        assert_eq!(map.dma_buf().unwrap_err(), dma_buf);
        assert_eq!(device.prove(Capability::DmaBuf).outcome, Err(dma_buf));
        let multicast = refused(Capability::Multicast, "the driver has no `cuMulticastCreate`");
        assert_eq!(device.prove(Capability::Multicast).outcome, Err(multicast));
        assert_eq!(device.prove(Capability::Create).outcome, Ok(()));
    });
}

#[test]
fn a_driver_that_is_too_old() {
    over_fake(test_name!(), &[("VERSION", "12020")], || {
        assert_eq!(reason(), "the driver is for CUDA 12.2, and 12.4 is needed: driver 550 or newer");
    });
}

#[test]
fn a_driver_that_shows_no_gpu() {
    over_fake(test_name!(), &[("DEVICES", "0")], || {
        assert_eq!(
            reason(),
            "`cuInit` answered CUDA_ERROR_NO_DEVICE (100): `CUDA_VISIBLE_DEVICES` may hide the GPU from this \
             process"
        );
    });
}

#[test]
fn a_driver_that_hides_one_gpu() {
    over_fake(test_name!(), &[("DEVICES", "1")], || {
        let error = cuda::backend().unwrap().device(1).unwrap_err();
        let expected = Error::NoSuchDevice { backend: BackendKind::Cuda, device: DeviceId(1), count: 1 };
        assert_eq!(error, expected);
        assert_eq!(error.hint(), Some("`CUDA_VISIBLE_DEVICES` may hide GPUs from this process"));
    });
}

/// The calls that open the backend, with one GPU.
const OPENING: [&str; 9] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceTotalMem",
    "cuDeviceGetUuid",
    "cuDeviceGetAttribute",
    "cuDeviceGetAttribute",
];

#[test]
fn a_driver_that_fails_to_open_with_a_code_of_its_own() {
    for nth in 1..=OPENING.len() {
        over_fake(test_name!(), &[("DEVICES", "1"), ("FAIL_CALL", &nth.to_string())], || {
            let nth: usize = std::env::var("WHOLEMEM_FAKE_CUDA_FAIL_CALL").unwrap().parse().unwrap();
            assert_eq!(reason(), format!("`{}` answered a code of its own, 987", OPENING[nth - 1]));
        });
    }
}

#[test]
fn a_code_of_its_own_comes_through_as_it_is() {
    let nth = (OPENING.len() + 3).to_string();
    over_fake(test_name!(), &[("DEVICES", "1"), ("FAIL_CALL", &nth)], || {
        let device = cuda::backend().unwrap().device(0).unwrap();
        // Two questions for the granules come first.
        let error = device.allocate(STEP).unwrap_err();
        let attempt = Attempt::Create { len: STEP, device: device.label() };
        assert_eq!(error, Error::Failed { attempt, cause: driver_said("cuMemCreate", 987) });
        assert_eq!((error.hint(), error.code()), (None, 106));
        let source = std::error::Error::source(&error).unwrap();
        assert_eq!(source.to_string(), "`cuMemCreate` answered a code of its own, 987");
        assert!(device.allocate(STEP).is_ok(), "the next one is had");
    });
}

#[test]
fn more_memory_than_there_is() {
    over_fake(test_name!(), &[], || {
        let device = cuda::backend().unwrap().device(0).unwrap();
        let len = 65 << 30;
        let error = device.allocate(len).unwrap_err();
        let attempt = Attempt::Create { len, device: device.label() };
        assert_eq!(error, Error::Failed { attempt, cause: driver_said("cuMemCreate", 2) });
        assert_eq!(error.hint(), Some("`nvidia-smi` shows who holds the GPU's memory"));
    });
}

#[test]
fn a_kernel_that_is_newer_than_the_driver() {
    over_fake(test_name!(), &[("VERSION", "12040")], || {
        let device = cuda::backend().unwrap().device(0).unwrap();
        for (ptx, code, hint) in [
            (
                ".version 8.5\n",
                222,
                Some("the kernel is newer than the driver; driver 550 or newer loads ours"),
            ),
            ("no kernel at all", 218, None),
        ] {
            // SAFETY: nothing is launched from it.
            let error =
                unsafe { Module::load(&device, &KernelImage { ptx: Some(ptx), host: &[] }) }.unwrap_err();
            let attempt = Attempt::LoadModule { device: device.label() };
            assert_eq!(error, Error::Failed { attempt, cause: driver_said("cuModuleLoadDataEx", code) });
            assert_eq!(error.hint(), hint);
        }
    });
}

#[test]
fn numbers_beyond_an_int_are_invalid_values() {
    over_fake(test_name!(), &[], || {
        let backend = cuda::backend().unwrap();
        let device = backend.device(0).unwrap();
        let node = AllocationSpec { node: Some(1 << 31), ..AllocationSpec::new(&device, STEP) };
        let error = Allocation::create(&backend, &node).unwrap_err();
        assert_eq!(error, Error::Failed { attempt: Attempt::Inspect, cause: driver_said("cuMemCreate", 1) });

        // SAFETY: nothing is launched from it.
        let module =
            unsafe { Module::load(&device, &KernelImage { ptx: Some(cuda::TESTING_PTX), host: &[] }) };
        let function = module.unwrap().function("wait_then_set").unwrap();
        let error = function.occupancy(1 << 31, 0).unwrap_err();
        let cause = driver_said("cuOccupancyMaxActiveBlocksPerMultiprocessor", 1);
        assert_eq!(error, Error::Failed { attempt: Attempt::Launch { name: "wait_then_set" }, cause });
    });
}

#[test]
fn handles_of_a_fabric_that_is_not_there() {
    over_fake(test_name!(), &[], || {
        let backend = cuda::backend().unwrap();
        let device = backend.device(0).unwrap();
        let error = Allocation::import(&device, ShareHandle::Fabric([0xA5; 64]), STEP).unwrap_err();
        let attempt = Attempt::Import { len: STEP, device: device.label() };
        let cause = driver_said("cuMemImportFromShareableHandle", 801);
        assert_eq!(error, Error::Failed { attempt, cause });
        assert_eq!(error.hint(), None);

        let fabric = AllocationSpec { handle: HandleKind::Fabric, ..AllocationSpec::new(&device, STEP) };
        let error = Allocation::create(&backend, &fabric).unwrap_err();
        let attempt = Attempt::Create { len: STEP, device: device.label() };
        assert_eq!(error, Error::Failed { attempt, cause: driver_said("cuMemCreate", 800) });
        let hint = "fabric handles need the IMEX service and its channel in `/dev/nvidia-caps-imex-channels`";
        assert_eq!(error.hint(), Some(hint));
    });
}

#[test]
fn descriptors_and_tokens_that_are_no_memory() {
    over_fake(test_name!(), &[], || {
        let device = cuda::backend().unwrap().device(0).unwrap();
        let (pipe, _) = rustix::pipe::pipe().unwrap();
        let error = Allocation::import(&device, ShareHandle::from(pipe), STEP).unwrap_err();
        let attempt = Attempt::Import { len: STEP, device: device.label() };
        let cause = driver_said("cuMemImportFromShareableHandle", 1);
        assert_eq!(error, Error::Failed { attempt, cause });

        let buffer = PlainBuffer::create(&device, 4096).unwrap();
        let garbage = ShareHandle::CudaIpc { token: [1; 64], offset: 0 };
        for (handle, code) in [(garbage, 1), (buffer.export().unwrap(), 201)] {
            let error = PlainBuffer::import(&device, &handle, 8).unwrap_err();
            let attempt = Attempt::ImportPlain { len: 8, device: device.label() };
            assert_eq!(error, Error::Failed { attempt, cause: driver_said("cuIpcOpenMemHandle", code) });
        }
    });
}

#[test]
fn pointers_that_are_no_allocations() {
    over_fake(test_name!(), &[], || {
        let device = cuda::backend().unwrap().device(0).unwrap();
        let older = PlainBuffer::create(&device, STEP).unwrap();
        let error = Allocation::adopt(&device, older.address(), STEP).unwrap_err();
        assert!(matches!(error, Error::Unsupported { capability: Capability::ShareFd, .. }), "{error:?}");

        let own = [0_u8; 8];
        // Also of the last address of all, behind which there is none.
        for address in [own.as_ptr().addr() as u64, u64::MAX] {
            let error = Allocation::adopt(&device, address, 8).unwrap_err();
            let attempt = Attempt::Adopt { len: 8, device: device.label() };
            assert_eq!(error, Error::Failed { attempt, cause: driver_said("cuMemGetAddressRange", 500) });
        }
    });
}

#[test]
fn a_forked_child_is_told_to_start_a_new_process() {
    over_fake(test_name!(), &[], || {
        cuda::backend().unwrap();
        in_forked_child(|| {
            let error = Backend::open(BackendKind::Cuda).unwrap_err();
            let reason =
                "the process was forked after CUDA was started in it; start a new program instead".to_owned();
            assert_eq!(error, Error::Unavailable { backend: BackendKind::Cuda, reason });
        });
    });
}
