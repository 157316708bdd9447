//! Tests of objects in GPU memory: on a real GPU if there is one, and always with the fake driver.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use wholemem_hal::Backend;
use wholemem_hal::pattern::{self, Pattern};
use wholemem_store::{Client, Mirror, Pack};
use wholemem_testkit::{FakeCuda, Ranks, cuda, test_name};

use crate::test_store::TestStore;

fn connect(store: &TestStore, backend: &Backend) -> Client {
    Client::connect_with(store.socket(), Some(backend.clone())).unwrap()
}

fn fill(client: &Client, backend: &Backend, name: &str, len: usize, value: u8) {
    let device = backend.device(0).unwrap();
    let draft = client.create_on(&device, name, len).unwrap();
    assert!(!draft.is_cpu() && draft.bytes().is_err());
    let stream = device.stream().unwrap();
    stream.fill(&draft.span().unwrap().unwrap(), value).unwrap();
    draft.seal_after(&stream).unwrap().wait().unwrap();
}

fn first_and_last(client: &Client, name: &str) -> (u8, u8) {
    let object = client.get(name).unwrap();
    assert!(!object.is_cpu() && object.bytes().is_err());
    let mirror = Mirror::of_object(&object).unwrap();
    let (mut first, mut last) = ([0], [0]);
    mirror.bytes().unwrap().read_at(0, &mut first).unwrap();
    mirror.bytes().unwrap().read_at(object.len() - 1, &mut last).unwrap();
    (first[0], last[0])
}

mod suite {
    use super::*;

    #[test]
    fn device_objects_are_shared_and_outlive_their_creator_and_the_server() {
        let Some(backend) = cuda::backend() else { return };
        let store = TestStore::start_with("cuda");
        let creator = connect(&store, &backend);
        fill(&creator, &backend, "small", 1000, 3);
        fill(&creator, &backend, "large", 5 << 20, 4);
        drop(creator);
        store.kill("server");
        let reader = connect(&store, &backend);
        assert_eq!(first_and_last(&reader, "small"), (3, 3));
        assert_eq!(first_and_last(&reader, "large"), (4, 4));
    }

    #[test]
    fn a_pack_on_a_device_is_one_mapping() {
        let Some(backend) = cuda::backend() else { return };
        let store = TestStore::start_with("cuda");
        let (creator, reader) = (connect(&store, &backend), connect(&store, &backend));
        let device = backend.device(0).unwrap();
        let mut pack = Pack::new("p").on(&device);
        for member in 0..100 {
            pack = pack.add(&format!("p/{member}"), 64 << 10);
        }
        let draft = creator.create_pack(&pack).unwrap();
        let stream = device.stream().unwrap();
        for member in 0..100_u8 {
            stream.fill(&draft.span(usize::from(member)).unwrap().unwrap(), member).unwrap();
        }
        stream.synchronize(wholemem_os::Deadline::NEVER).unwrap();
        drop(stream);
        draft.seal().unwrap();
        let held = reader.get_pack("p").unwrap();
        let stream = device.stream().unwrap();
        for member in [0_u8, 57, 99] {
            let mut seen = [0; 3];
            let span = held.span(&format!("p/{member}")).unwrap();
            stream.read(&span.part(1000, 3).unwrap(), &mut seen).unwrap();
            assert_eq!(seen, [member; 3]);
        }
    }

    #[test]
    fn kernels_on_an_object_succeed_while_the_server_is_killed() {
        const LEN: usize = 48 << 20;
        let Some(backend) = cuda::backend() else { return };
        let store = TestStore::start_with("cuda");
        let device = backend.device(0).unwrap();
        let (creator, reader) = (connect(&store, &backend), connect(&store, &backend));
        let kernels = Pattern::load(&device).unwrap();
        let stream = device.stream().unwrap();
        let draft = creator.create_on(&device, "object", LEN).unwrap();
        kernels.fill(&stream, &draft.span().unwrap().unwrap(), 5).unwrap();
        draft.seal_after(&stream).unwrap().wait().unwrap();
        let expected = pattern::expected(5, LEN);
        let object = reader.get("object").unwrap();
        let (begun, has_finished) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            // The kernels run one after the other, so that at any time a kernel reads the object.
            let reading = scope.spawn(|| {
                while !has_finished.load(Ordering::Acquire) {
                    begun.fetch_add(1, Ordering::AcqRel);
                    assert_eq!(kernels.checksum(&stream, &object.span().unwrap()).unwrap(), expected);
                }
            });
            for _ in 0..3 {
                let before = begun.load(Ordering::Acquire);
                while begun.load(Ordering::Acquire) < before + 2 && !reading.is_finished() {
                    std::thread::yield_now();
                }
                store.kill("server");
            }
            has_finished.store(true, Ordering::Release);
            reading.join().unwrap();
        });
        assert_eq!(
            first_and_last(&connect(&store, &backend), "object").0,
            pattern::word(5, 0).to_ne_bytes()[0]
        );
    }

    #[test]
    fn a_server_uses_almost_no_memory_of_a_gpu() {
        if cuda::backend().is_none() && !Ranks::is_rank() {
            return;
        }
        // The measurement runs in a separate process, so that no other test changes the available memory.
        Ranks::of(1).run(test_name!(), |_| measure_a_server(&cuda::backend().unwrap()));
    }

    fn measure_a_server(backend: &Backend) {
        const MAX_USED: usize = 8 << 20;
        let device = backend.device(0).unwrap();
        // Creates the GPU context of this process first, so that its memory is not counted.
        drop(device.stream().unwrap());
        let before = device.available().unwrap();
        let store = TestStore::start_with("cuda");
        let client = connect(&store, backend);
        fill(&client, backend, "object", 4 << 20, 1);
        client.delete(client.stat("object").unwrap().id).unwrap();
        drop(client);
        let after = device.available().unwrap();
        let used = before.saturating_sub(after);
        // The difference includes memory of other processes, if these use the GPU too.
        assert!(used <= MAX_USED, "{used} bytes");
    }

    #[test]
    fn device_memory_is_freed() {
        let Some(backend) = cuda::backend() else { return };
        let store = TestStore::start_with("cuda");
        let client = connect(&store, &backend);
        let rounds = if wholemem_testkit::exhaustive() { 10_000 } else { 200 };
        for round in 0..rounds {
            fill(&client, &backend, "name", 4 << 20, 1);
            assert_eq!(client.status().unwrap().device.used, 4 << 20, "round {round}");
        }
        client.delete(client.stat("name").unwrap().id).unwrap();
        assert_eq!(client.status().unwrap().device.used, 0);
    }
}

#[test]
fn objects_work_with_the_fake_driver() {
    let Some(fake) = FakeCuda::install() else { return };
    let passed = fake.rerun(&["gpu::suite::", "adopt::suite::"], &[]);
    assert!(passed >= 7, "{passed} tests ran");
}
