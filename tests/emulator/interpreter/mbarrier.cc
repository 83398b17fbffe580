#include "mbarrier.h"

#include "error.h"
#include "memory.h"

namespace emulator {
namespace {

constexpr uint64_t kCountMask = kMaxArrivals, kTransactionMask = (1 << 21) - 1;
constexpr uint64_t kInitialised = 2;

}  // namespace

Mbarrier::Mbarrier(uint64_t word)
    : expected(word & kCountMask),
      pending(word >> 20 & kCountMask),
      transactions(static_cast<int64_t>(word << 3) >> 43),
      parity(Parity(word)) {}

uint64_t Mbarrier::Word() const {
  return expected | uint64_t{pending} << 20 |
         (static_cast<uint64_t>(transactions) & kTransactionMask) << 40 | uint64_t{parity} << 61 |
         kInitialised << 62;
}

void Mbarrier::Update(int64_t transactions_added, uint32_t arrivals) {
  transactions += transactions_added;
  if (transactions < -int64_t{kMaxArrivals} || transactions > int64_t{kMaxArrivals}) {
    Fail("mbarrier: transaction count out of range (%s)", Describe().c_str());
  }
  if (arrivals > pending) Fail("mbarrier: %u arrivals (%s)", arrivals, Describe().c_str());
  pending -= arrivals;
  if (pending == 0 && transactions == 0) {
    parity ^= 1;
    pending = expected;
  }
}

std::string Mbarrier::Describe() const {
  return Format("pending %u of %u, transactions %lld, phase %u", pending, expected,
                static_cast<long long>(transactions), parity);
}

uint64_t* FindMbarrier(Cta& from, uint32_t address, bool own) {
  if (address % 8) Fail("misaligned mbarrier 0x%x", address);
  auto* word = reinterpret_cast<uint64_t*>(SharedBytes(from, address, 8, own));
  if (*word >> 62 != kInitialised) {
    Fail("mbarrier at offset %d not initialised (0x%llx)",
         static_cast<int>(address & 0xffffff) - static_cast<int>(kSharedBase),
         static_cast<unsigned long long>(*word));
  }
  return word;
}

PhaseOrder& OrderOfPhases(Cta& from, uint32_t address) {
  return CtaOf(*from.cluster, address).phases[address & 0xffffff];
}

}  // namespace emulator
