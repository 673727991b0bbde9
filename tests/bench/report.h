// The printed report, and the JSON file.
#pragma once

#include <cstdio>

#include "measure.h"

namespace scaledot::bench {

inline std::string format(const char* form, double value) {
  char text[64];
  std::snprintf(text, sizeof text, form, value);
  return text;
}

inline std::string time_text(double seconds) {
  if (seconds < 1e-3) return format("%.2f us", seconds * 1e6);
  return seconds < 1 ? format("%.3f ms", seconds * 1e3) : format("%.3f s", seconds);
}

inline void print_heading() {
  std::printf("%-22s %-9s %-9s %-16s %-17s %11s %8s  %-34s %-6s\n", "shape", "dtype", "pass", "options", "kernel",
              "time", "GFLOP/s", "of the limit", "plain");
}

inline void print_row(const Measured& m) {
  std::string limit =
      m.peak > 0 ? format("%3.0f%% of ", 100 * m.rate() / m.peak) + format("%.0f ", m.peak / 1e9) + m.peak_name : "-";
  if (m.read_bandwidth > 0)
    limit = format("%3.0f%% of ", 100 * m.read_rate() / m.read_bandwidth) +
            format("%.1f GB/s, reads ", m.read_bandwidth / 1e9) + format("%.1f", m.read_rate() / 1e9);
  std::printf("%-22s %-9s %-9s %-16s %-17s %11s %8.1f  %-34s %-6s\n", text_of(m.c.shape).c_str(), name_of(m.c.dtype),
              name_of(m.c.pass), text_of(m.c.options).c_str(), m.kernel.c_str(), time_text(m.seconds).c_str(),
              m.rate() / 1e9, limit.c_str(), m.plain > 0 ? format("%.2fx", m.seconds / m.plain).c_str() : "");
  std::fflush(stdout);
}

inline void print_schedule(const Case& c, const char* kernel, const Recording& recording, int cores) {
  constexpr size_t kMostPhases = 12;
  const Schedule one = simulate(recording, 1), many = simulate(recording, cores);
  std::printf("%s %s %s %s, kernel %s: %s on one core, %s outside of tasks\n", text_of(c.shape).c_str(),
              name_of(c.dtype), name_of(c.pass), text_of(c.options).c_str(), kernel, time_text(one.span).c_str(),
              time_text(recording.serial).c_str());
  std::printf("  %d cores: phase    tasks   longest task          span   busy\n", cores);
  for (size_t k = 0; k < many.phases.size() && k < kMostPhases; ++k) {
    const PhaseShare& p = many.phases[k];
    std::printf("           %6zu %8lld  %12s  %12s  %4.0f%%\n", k + 1, static_cast<long long>(p.tasks),
                time_text(p.longest).c_str(), time_text(p.span).c_str(), 100 * p.busy);
  }
  if (many.phases.size() > kMostPhases)
    std::printf("           and %zu more phases\n", many.phases.size() - kMostPhases);
  std::printf("  cores      time  speed-up   idle  most idle core\n");
  for (int n = 1; n <= std::max(cores, 64); n *= 2) {
    const Schedule s = simulate(recording, n);
    std::printf("  %5d %11s  %6.1fx  %4.1f%%  %4.1f%%\n", n, time_text(s.span).c_str(), one.span / s.span, 100 * s.idle,
                100 * s.worst);
  }
  std::fflush(stdout);
}

// Only our own numbers and names: quotes and backslashes are all that has to be escaped.
inline std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') result.push_back('\\');
    result.push_back(c);
  }
  result.push_back('"');
  return result;
}
inline std::string exact(double value) { return format("%.9g", value); }

inline void write_json(const std::string& file, const std::vector<Measured>& rows, int threads) {
  std::ofstream out(file);
  out << "{\n \"format\": 1,\n \"cpu\": " << quoted(cpu_model()) << ",\n \"capability\": " << quoted(cpu_capability())
      << ",\n \"threads\": " << threads << ",\n \"compiler\": " << quoted(__VERSION__) << ",\n \"cases\": [";
  for (size_t k = 0; k < rows.size(); ++k) {
    const Measured& m = rows[k];
    out << (k ? ",\n" : "\n") << "  {\"shape\": " << quoted(text_of(m.c.shape))
        << ", \"dtype\": " << quoted(name_of(m.c.dtype)) << ", \"pass\": " << quoted(name_of(m.c.pass))
        << ", \"options\": " << quoted(text_of(m.c.options)) << ", \"kernel\": " << quoted(m.kernel)
        << ", \"workspace\": " << m.workspace << ", \"seconds\": " << exact(m.seconds)
        << ", \"flops\": " << exact(flops(m.c)) << ", \"flops_per_second\": " << exact(m.rate());
    if (m.peak > 0)
      out << ", \"peak\": " << quoted(m.peak_name) << ", \"peak_flops_per_second\": " << exact(m.peak)
          << ", \"share_of_peak\": " << exact(m.rate() / m.peak);
    if (m.read_bandwidth > 0)
      out << ", \"bytes\": " << exact(key_value_bytes(m.c)) << ", \"read_bandwidth\": " << exact(m.read_bandwidth)
          << ", \"share_of_bandwidth\": " << exact(m.read_rate() / m.read_bandwidth);
    if (m.plain > 0) out << ", \"plain_seconds\": " << exact(m.plain);
    out << ", \"readings\": [";
    for (size_t r = 0; r < m.readings.size(); ++r) out << (r ? ", " : "") << exact(m.readings[r]);
    out << "]}";
  }
  out << "\n ]\n}\n";
  if (!out.flush()) throw std::runtime_error("--json: cannot write '" + file + "'");
}

}  // namespace scaledot::bench
