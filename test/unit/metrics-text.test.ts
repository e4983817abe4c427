import { describe, expect, it } from 'vitest';
import { detectEngineKind, parseEngineMetrics } from '../../src/engine/metrics-text.ts';
import { parseModelCards } from '../../src/engine/model-cards.ts';

const VLLM = `# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79533021542e+09
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="m"} 6.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1024",sliding_window="None"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 7.0
`;

describe('parseEngineMetrics', () => {
  it('reads load, layout and start time of a vLLM text', () => {
    expect(parseEngineMetrics(VLLM)).toEqual({
      blockSize: 16,
      numGpuBlocks: 1024,
      processStartSeconds: 1795330215.42,
      running: 3,
      waiting: 5,
      waitingDeferred: 4,
      kvCacheUsage: 0.25,
      kvExpired: 6,
    });
  });

  it('reads an SGLang text: queues for room and for KV, layout as gauges or as labels', () => {
    const text = [
      'sglang:num_running_reqs{engine_type="decode",model_name="m"} 4.0',
      'sglang:num_queue_reqs{engine_type="decode",model_name="m"} 2.0',
      'sglang:num_decode_prealloc_queue_reqs{engine_type="decode",model_name="m"} 3.0',
      'sglang:num_decode_transfer_queue_reqs{engine_type="decode",model_name="m"} 5.0',
      'sglang:num_prefill_inflight_queue_reqs{engine_type="decode",model_name="m"} 0.0',
      'sglang:token_usage{engine_type="decode",model_name="m"} 0.28',
    ].join('\n');
    const layout = { blockSize: 64, numGpuBlocks: 900 };
    expect(detectEngineKind(text)).toBe('sglang');
    const load = { running: 4, waiting: 10, waitingDeferred: 5, kvCacheUsage: 0.28 };
    expect(parseEngineMetrics(text, 'sglang')).toEqual(load);
    const gauges = 'sglang:page_size{} 64.0\nsglang:num_pages{} 900.0\n';
    expect(parseEngineMetrics(`${gauges}${text}`, 'sglang')).toEqual({ ...load, ...layout });
    const labels = 'sglang:cache_config_info{num_pages="900",page_size="64"} 1.0\n';
    expect(parseEngineMetrics(`${labels}${text}`, 'sglang')).toEqual({ ...load, ...layout });
  });

  it('adds the ranks up and takes the fullest cache', () => {
    const text = [
      'vllm:num_requests_running{engine="0"} 1',
      'vllm:num_requests_running{engine="1"} 2',
      'vllm:kv_cache_usage_perc{engine="0"} 0.9',
      'vllm:kv_cache_usage_perc{engine="1"} 0.1',
      'vllm:cache_config_info{block_size="16",num_gpu_blocks="10"} 1',
      'vllm:cache_config_info{block_size="16",num_gpu_blocks="20"} 1',
    ].join('\r\n');
    expect(parseEngineMetrics(text)).toEqual({ running: 3, kvCacheUsage: 0.9, blockSize: 16, numGpuBlocks: 30 });
  });

  it('does not know the block size where ranks disagree', () => {
    const text = 'vllm:cache_config_info{block_size="16"} 1\nvllm:cache_config_info{block_size="32"} 1\n';
    expect(parseEngineMetrics(text)).toEqual({});
  });

  it('prefers the current name over the old one, in either order', () => {
    const now = 'vllm:kv_cache_usage_perc 0.5\n';
    const old = 'vllm:gpu_cache_usage_perc 0.7\n';
    expect(parseEngineMetrics(old)).toEqual({ kvCacheUsage: 0.7 });
    expect(parseEngineMetrics(old + now)).toEqual({ kvCacheUsage: 0.5 });
    expect(parseEngineMetrics(now + old)).toEqual({ kvCacheUsage: 0.5 });
  });

  it('reads labels with escapes, braces and commas in them, and a timestamp', () => {
    const text = 'vllm:num_requests_waiting_by_reason{model_name="a\\"},{b\\\\",reason="deferred",} 2 1700000000000\n';
    expect(parseEngineMetrics(text)).toEqual({ waitingDeferred: 2 });
  });

  it.each([
    ['nothing', ''],
    ['JSON', '{"vllm:num_requests_running": 3}'],
    ['HTML', '<html>\nvllm:num_requests_running\n</html>'],
    [
      'values that are no numbers',
      'vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\nprocess_start_time_seconds x',
    ],
    ['a negative gauge', 'vllm:num_requests_running -1'],
    ['unknown layout', 'vllm:cache_config_info{block_size="None",num_gpu_blocks="0"} 1'],
    ['labels that do not end', 'vllm:cache_config_info{block_size="16" 1'],
    ['other names', 'vllm:num_requests_running_x 3\nxvllm:num_requests_running 3'],
  ])('knows nothing from %s', (_, text) => {
    expect(parseEngineMetrics(text)).toEqual({});
  });
});

describe('detectEngineKind', () => {
  it('goes by the prefix of the names', () => {
    expect(detectEngineKind(VLLM)).toBe('vllm');
    expect(detectEngineKind('# vllm:x\nother_metric 1\n')).toBeUndefined();
  });
});

describe('parseModelCards', () => {
  it('keeps each card as written and reads its names and window', () => {
    const base =
      '{ "id":"m","object":"model","root":"/models/m","parent":null,"max_model_len":4096, "x":1.0, "big":12345678901234567890 }';
    const adapter = '{"id":"lora-a","root":"adapters/a","parent":"m","permission":[{"a":"],["}]}';
    expect(parseModelCards(`{"data":[1],"object":"list","data":[ ${base} ,\n${adapter}]}`)).toEqual([
      { id: 'm', root: '/models/m', parent: '', maxModelLen: 4096, rawJson: base },
      { id: 'lora-a', root: 'adapters/a', parent: 'm', rawJson: adapter },
    ]);
  });

  it('leaves out what is no card', () => {
    expect(parseModelCards('{"data":[null,7,"m",{},{"id":5},{"id":""},{"id":"m"}]}')?.map(({ id }) => id)).toEqual([
      'm',
    ]);
  });

  it.each(['', 'not found', '[]', '{"data":{}}', '{"detail":"Not Found"}', '{"data":[', '{"error":"Unauthorized"}'])(
    'is no list: %s',
    (text) => expect(parseModelCards(text)).toBeUndefined(),
  );

  it('takes an empty list as known', () => {
    expect(parseModelCards('{"object":"list","data":[]}')).toEqual([]);
  });
});
