//! What waits for the kernel, each device's for itself, and how much of the kernel's room each has.
//!
//! The kernel takes so many operations and not more. Each device has an equal part of that, so that one that answers no more
//! fills its own part and the others' operations go on. Devices take turns, so that none has to wait until another's backlog
//! is handed over. A core: no clock, thread or file.

use std::collections::VecDeque;

use offload_api::ids::DeviceIndex;

/// All devices' backlogs.
#[derive(Debug)]
pub(super) struct Backlog {
    /// `None`: it was removed.
    backlog: Vec<Option<Lane>>,
    /// Operations the kernel takes.
    room: usize,
    /// Whose turn it is.
    next: usize,
    waiting_count: usize,
    kernel_count: usize,
}

#[derive(Debug, Default)]
struct Lane {
    /// Places of operations, the oldest first.
    backlog: VecDeque<usize>,
    kernel_count: usize,
}

impl Backlog {
    /// No devices yet, and a kernel with room for so many operations.
    pub(super) fn new(room: usize) -> Self {
        Self {
            backlog: Vec::new(),
            room,
            next: 0,
            waiting_count: 0,
            kernel_count: 0,
        }
    }

    /// One more device, behind the others. Those have less from now on; what they have in the kernel stays there.
    pub(super) fn add(&mut self) {
        self.backlog.push(Some(Lane::default()));
    }

    /// The one that was added last was not to be.
    pub(super) fn forget_last(&mut self) {
        self.backlog.pop();
    }

    /// Nothing is in flight on this device, and nothing will be: its part is the others'.
    pub(super) fn remove(&mut self, device: DeviceIndex) {
        self.backlog[device.0 as usize] = None;
    }

    /// The operation at `place` waits.
    pub(super) fn push(&mut self, device: DeviceIndex, place: usize) {
        self.lane(device).backlog.push_back(place);
        self.waiting_count += 1;
    }

    /// The next operation for the kernel, which has it from now on.
    pub(super) fn take(&mut self) -> Option<usize> {
        if self.waiting_count == 0 {
            return None;
        }
        let part = self.part();
        for _ in 0..self.backlog.len() {
            let index = self.next % self.backlog.len();
            self.next = index + 1;
            if let Some(lane) = &mut self.backlog[index]
                && lane.kernel_count < part
                && let Some(place) = lane.backlog.pop_front()
            {
                lane.kernel_count += 1;
                self.kernel_count += 1;
                self.waiting_count -= 1;
                return Some(place);
            }
        }
        None
    }

    /// The kernel has given one back.
    pub(super) fn gave_back(&mut self, device: DeviceIndex) {
        self.lane(device).kernel_count -= 1;
        self.kernel_count -= 1;
    }

    /// What waits is not to begin any more.
    pub(super) fn discard_unreadable(&mut self) {
        for lane in self.backlog.iter_mut().flatten() {
            lane.backlog.clear();
        }
        self.waiting_count = 0;
    }

    pub(super) fn waiting_count(&self) -> usize {
        self.waiting_count
    }

    /// With the kernel.
    pub(super) fn kernel_count(&self) -> usize {
        self.kernel_count
    }

    /// Of the kernel's room, what each device has.
    fn part(&self) -> usize {
        let device_count = self.backlog.iter().flatten().count();
        (self.room / device_count.max(1)).max(1)
    }

    fn lane(&mut self, device: DeviceIndex) -> &mut Lane {
        let lane = self.backlog[device.0 as usize].as_mut();
        lane.expect("nothing is asked of a device that was removed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEAD: DeviceIndex = DeviceIndex(0);
    const GOOD: DeviceIndex = DeviceIndex(1);

    fn taken(backlog: &mut Backlog) -> Vec<usize> {
        std::iter::from_fn(|| backlog.take()).collect()
    }

    #[test]
    fn a_device_that_answers_no_more_fills_its_own_part() {
        let mut backlog = Backlog::new(32);
        backlog.add();
        backlog.add();
        for place in 0..100 {
            backlog.push(DEAD, place);
        }
        assert_eq!(taken(&mut backlog), Vec::from_iter(0..16));
        for place in 200..220 {
            backlog.push(GOOD, place);
        }
        assert_eq!(taken(&mut backlog), Vec::from_iter(200..216));
        assert_eq!((backlog.kernel_count(), backlog.waiting_count()), (32, 88));
        backlog.gave_back(GOOD);
        assert_eq!(taken(&mut backlog), [216]);
    }

    #[test]
    fn devices_take_turns_and_what_comes_and_goes_shares_anew() {
        let mut backlog = Backlog::new(8);
        backlog.add();
        for place in 0..9 {
            backlog.push(DEAD, place);
        }
        backlog.add();
        for place in 10..13 {
            backlog.push(GOOD, place);
        }
        assert_eq!(taken(&mut backlog), [0, 10, 1, 11, 2, 12, 3]);
        for _ in 0..3 {
            backlog.gave_back(GOOD);
        }
        backlog.remove(GOOD);
        assert_eq!(taken(&mut backlog), [4, 5, 6, 7]);
        backlog.discard_unreadable();
        backlog.gave_back(DEAD);
        assert_eq!((backlog.take(), backlog.waiting_count()), (None, 0));
        assert_eq!(backlog.kernel_count(), 7);
    }

    #[test]
    fn each_has_room_for_one_where_the_kernel_has_less_than_devices() {
        let mut backlog = Backlog::new(1);
        for device in 0..3 {
            backlog.add();
            backlog.push(DeviceIndex(device), device as usize);
        }
        assert_eq!(taken(&mut backlog), [0, 1, 2]);
    }
}
