import { monitorEventLoopDelay, performance } from 'node:perf_hooks';
import type { Gauge } from 'prom-client';
import type { SeriesRegistry } from './series-registry.ts';

/** prom-client's own collection starts observers and timers that outlive a registry; these are read at each scrape. */
export function addProcessSeries(series: SeriesRegistry): void {
  const began = Date.now() / 1000 - process.uptime();
  series.gauge('process_start_time_seconds').set(began);
  series.counter('process_cpu_seconds_total', (counter) => {
    const { user, system } = process.cpuUsage();
    counter.reset();
    counter.inc((user + system) / 1e6);
  });
  series.gauge('process_resident_memory_bytes', (gauge) => gauge.set(process.memoryUsage.rss()));
  series.gauge('nodejs_heap_size_used_bytes', (gauge) => gauge.set(process.memoryUsage().heapUsed));
  series.gauge('nodejs_external_memory_bytes', (gauge) => gauge.set(process.memoryUsage().external));
  let before = performance.eventLoopUtilization();
  series.gauge('nodejs_eventloop_utilization', (gauge) => {
    const at = performance.eventLoopUtilization();
    gauge.set(performance.eventLoopUtilization(at, before).utilization);
    before = at;
  });
}

/** Between two timers whose lateness is measured. */
const LAG_RESOLUTION_MS = 20;

/** Seconds that timers were late; Node's histogram has nanoseconds, and counts the interval between its timers, too. */
function lateness(nanoseconds: number, count: number): number {
  return count === 0 ? 0 : Math.max(0, nanoseconds / 1e9 - LAG_RESOLUTION_MS / 1000);
}

/** How late timers are, told of the time since the scrape before; 0 while nothing watches. */
export class EventLoopLag {
  readonly #p50: Gauge;
  readonly #p99: Gauge;
  readonly #max: Gauge;
  #delay: ReturnType<typeof monitorEventLoopDelay> | undefined;

  constructor(series: SeriesRegistry) {
    this.#p50 = series.gauge('nodejs_eventloop_lag_p50_seconds');
    this.#p99 = series.gauge('nodejs_eventloop_lag_p99_seconds');
    this.#max = series.gauge('nodejs_eventloop_lag_max_seconds');
  }

  /** Begins to measure, until the end of what is returned. */
  watch(): Disposable {
    const delay = monitorEventLoopDelay({ resolution: LAG_RESOLUTION_MS });
    delay.enable();
    this.#delay = delay;
    return { [Symbol.dispose]: () => void delay.disable() };
  }

  /** Sets the gauges, and begins anew. */
  show(): void {
    const delay = this.#delay;
    this.#p50.set(delay === undefined ? 0 : lateness(delay.percentile(50), delay.count));
    this.#p99.set(delay === undefined ? 0 : lateness(delay.percentile(99), delay.count));
    this.#max.set(delay === undefined ? 0 : lateness(delay.max, delay.count));
    delay?.reset();
  }
}
