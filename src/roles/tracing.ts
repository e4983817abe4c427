import { randomUUID } from 'node:crypto';
import type { Config } from '../config/config.ts';
import type { Logger } from '../obs/log.ts';
import { createLogLimit } from '../obs/log-limit.ts';
import type { Metrics } from '../obs/metrics.ts';
import type { Tracer } from '../obs/tracer.ts';

/** Between two warnings about a collector that does not take spans. */
const WARN_AGAIN_MS = 60_000;

/** The tracer of this process, which the stack closes; OpenTelemetry is loaded here and nowhere else, if it is wanted. */
export async function openTracer(
  { otlpEndpoint, sampleRatio, serviceName }: Config['tracing'],
  version: string,
  metrics: Metrics,
  log: Logger,
  stack: AsyncDisposableStack,
): Promise<Tracer | undefined> {
  if (otlpEndpoint === undefined) return undefined;
  const { openOtlpTracer } = await import('../tracing/otlp-tracer.ts');
  const warnings = createLogLimit(WARN_AGAIN_MS, () => performance.now());
  return stack.use(
    openOtlpTracer({
      url: `${otlpEndpoint}/v1/traces`,
      serviceName,
      instanceId: randomUUID(),
      version,
      sampleRatio,
      onExport(result, spans) {
        metrics.spansSent(result, spans);
        if (result === 'exported') return;
        const heldBack = warnings.pass();
        if (heldBack !== undefined) log.warn({ spans, held_back: heldBack }, 'the collector takes no traces');
      },
    }),
  );
}
