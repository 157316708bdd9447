//! Tests of the log events about communicators and collective calls. The subscriber is that of the whole process, because ranks are
//! threads, so this binary has one test.

#![expect(clippy::unwrap_used, reason = "all of this is tests")]

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use wholemem::os::log::LogSubscriber;
use wholemem::{
    Algorithm, Backend, Communicator, Dtype, HostConfig, PinnedBuffer, Rank, ReduceOp, SymmetricMemory,
    SymmetricSpec, Tuning,
};

/// The messages of the events since the last call of [`Messages::of_rank_0`].
#[derive(Clone, Default)]
struct Messages(Arc<Mutex<Vec<String>>>);

impl Messages {
    fn push(&self, message: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(message);
    }

    fn of_rank_0(&self) -> Vec<String> {
        let all = std::mem::take(&mut *self.0.lock().unwrap());
        all.into_iter().filter(|message| message.contains(" rank=0 ")).collect()
    }
}

fn first(call: &str, len: usize, algorithm: Algorithm, [input, output]: [&str; 2], reason: &str) -> String {
    let dtype = if call == "all_reduce" { "f32" } else { "u8" };
    // On a CPU the number of blocks is 1, because a call runs in one thread.
    format!(
        "first collective call of this kind rank=0 call=\"{call}\" dtype={dtype} len={len} algorithm={algorithm} \
         input=\"{input}\" output=\"{output}\" reason=\"{reason}\" blocks=1"
    )
}

#[test]
fn each_kind_of_call_is_logged_once_with_its_memory_path() {
    let messages = Messages::default();
    let sink = messages.clone();
    let filter = "wholemem::collective=debug,wholemem::communicator=debug".parse().unwrap();
    assert!(LogSubscriber::new(filter, move |record| sink.push(record.message)).install());

    let device = Backend::host(HostConfig::virtual_devices(1)).unwrap().device(0).unwrap();
    let groups = Communicator::local(&[device.clone(), device]).unwrap();
    let created = "created a communicator rank=0 ranks=2 device=host:0 name=\"virtual device 0\" \
                   host_memory=\"virtual device 0\" timeout=60s";
    assert_eq!(messages.of_rank_0(), [created]);

    let tuning =
        Tuning { packets: 64, one_shot_staged: 1024, one_shot_window: 1024, stage_window: 128, always: None };
    let spec = SymmetricSpec {
        staging_len: 64 << 10,
        packets_len: 1024,
        timeout: Duration::from_secs(50),
        tuning: Some(tuning),
        ..SymmetricSpec::default()
    };
    let symmetric = Communicator::on_each(&groups, |group| SymmetricMemory::create(group, &spec)).unwrap();
    let made = messages.of_rank_0();
    let [made] = &made[..] else { panic!("{made:?}") };
    let start = "created symmetric memory rank=0 ranks=2 device=host:0 lanes=1 timeout=50s tuning=Tuning { packets: 64, \
                 one_shot_staged: 1024, one_shot_window: 1024, stage_window: 128, always: None } limits=DeviceLimits { \
                 packets: 4096, blocks: ";
    assert!(made.starts_with(start) && made.contains(" window_space=8796093022208 "), "{made}");

    Communicator::on_each(&groups, |group| {
        let symmetric = &symmetric[group.rank().index()];
        let stream = group.device().stream()?;
        let private = PinnedBuffer::create(group.device(), 8192)?.all();
        let window = symmetric.mem_alloc(8192)?;
        let registered = symmetric.window_register(&group.device().allocate(64 << 10)?)?;
        // Only the first call of each kind and class of lengths is logged, so the second iteration logs nothing.
        for len in [64, 60, 256, 2048, 4092] {
            let own = private.part(0, len)?;
            symmetric.all_reduce(&stream, &own, &own, Dtype::F32, ReduceOp::Sum)?;
        }
        for _ in 0..2 {
            symmetric.all_reduce(
                &stream,
                window.range(0..100),
                window.range(0..100),
                Dtype::F32,
                ReduceOp::Sum,
            )?;
            symmetric.all_reduce(
                &stream,
                window.range(0..256),
                window.range(256..512),
                Dtype::F32,
                ReduceOp::Sum,
            )?;
            let (range, own) = (registered.range(0..2048), private.part(0, 2048)?);
            symmetric.all_reduce(&stream, range, &own, Dtype::F32, ReduceOp::Sum)?;
            symmetric.broadcast(&stream, Rank(1), registered.range(0..2048), registered.range(0..2048))?;
            symmetric.barrier(&stream)?;
        }
        Ok(())
    })
    .unwrap();
    let (private, short) =
        ("in no window, and not registered", "up to 128 bytes, staging an input in a window is faster");
    let input = format!("the input is {private}");
    let packets = "packets carry inputs of up to 64 bytes";
    let expected = [
        first("all_reduce", 64, Algorithm::Packets, ["packets", "local"], packets),
        // A call of 60 bytes is logged too, because it belongs to another class of lengths.
        first("all_reduce", 60, Algorithm::Packets, ["packets", "local"], packets),
        first("all_reduce", 256, Algorithm::OneShot, ["staged", "local"], &input),
        first(
            "all_reduce",
            2048,
            Algorithm::TwoShot,
            ["staged"; 2],
            &format!("input and output are {private}"),
        ),
        first("all_reduce", 100, Algorithm::OneShot, ["staged", "local"], short),
        first("all_reduce", 256, Algorithm::OneShot, ["window", "local"], "nothing is staged"),
        first(
            "all_reduce",
            2048,
            Algorithm::TwoShot,
            ["registered", "staged"],
            &format!("the output is {private}"),
        ),
        first("broadcast", 2048, Algorithm::OneShot, ["registered", "local"], "nothing is staged"),
    ];
    assert_eq!(messages.of_rank_0(), expected);
}
