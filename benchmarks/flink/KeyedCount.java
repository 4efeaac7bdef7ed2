import java.io.IOException;
import java.io.Serializable;
import java.util.Map;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.MapFunction;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.connector.sink2.Sink;
import org.apache.flink.api.connector.sink2.SinkWriter;
import org.apache.flink.api.connector.sink2.WriterInitContext;
import org.apache.flink.api.connector.source.lib.NumberSequenceSource;
import org.apache.flink.api.connector.source.util.ratelimit.RateLimiterStrategy;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.api.java.tuple.Tuple4;
import org.apache.flink.connector.datagen.source.DataGeneratorSource;
import org.apache.flink.connector.datagen.source.GeneratorFunction;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.util.Collector;

/**
 * The reference work, the keyed count, on Flink: DataStream API, see {@link Harness}.
 *
 * <p>Arguments beside those of the harness: {@code watch_after} (rows a sink subtask only counts; of later ones it keeps
 * the newest count and sum per key), {@code keys} ({@code int64} or {@code text}), and for latency {@code rate} (rows per
 * second) and {@code skip_s} (seconds of warm-up whose latencies do not count).
 *
 * <p>Leaves {@code state-*.bin} and, with a rate, {@code latency-*.bin} in the folder, as the other contenders do.
 */
public final class KeyedCount {
    static final int KEYS = 100_000;
    static final int BUCKET_NS = 10_000;
    static final int BUCKETS = 500_000;

    private KeyedCount() {}

    /** How the number of a key becomes a key, and the other way. */
    interface Keys<K> extends Serializable {
        K key(int number);

        int number(K key);

        TypeInformation<K> type();
    }

    static final class Int64Keys implements Keys<Long> {
        @Override
        public Long key(int number) {
            return (long) number;
        }

        @Override
        public int number(Long key) {
            return key.intValue();
        }

        @Override
        public TypeInformation<Long> type() {
            return Types.LONG;
        }
    }

    /** {@code key-000123}; made once, so that a row costs no formatting. */
    static final class TextKeys implements Keys<String> {
        private static final String[] ALL = new String[KEYS];

        static {
            for (int i = 0; i < KEYS; i++) {
                ALL[i] = String.format("key-%06d", i);
            }
        }

        @Override
        public String key(int number) {
            return ALL[number];
        }

        @Override
        public int number(String key) {
            return Integer.parseInt(key, 4, 10, 10);
        }

        @Override
        public TypeInformation<String> type() {
            return Types.STRING;
        }
    }

    /** Row number to (key, value, time of emission). The time is read for the first row, or for all if asked. */
    static final class Row<K> implements MapFunction<Long, Tuple3<K, Long, Long>> {
        private final Keys<K> keys;
        private final boolean stamped;
        private boolean noted;

        Row(Keys<K> keys, boolean stamped) {
            this.keys = keys;
            this.stamped = stamped;
        }

        @Override
        public Tuple3<K, Long, Long> map(Long row) {
            long nowNs = 0;
            if (stamped || !noted) {
                nowNs = System.nanoTime();
                if (!noted) {
                    noted = true;
                    Harness.emitted(nowNs);
                }
            }
            return Tuple3.of(keys.key((int) Long.remainderUnsigned(Harness.mix(row), KEYS)), row, nowNs);
        }
    }

    /** Running count and sum of a key: (key, count, sum, time of emission) for every row. */
    static final class CountAndSum<K> extends KeyedProcessFunction<K, Tuple3<K, Long, Long>, Tuple4<K, Long, Long, Long>> {
        private transient ValueState<Tuple2<Long, Long>> state;

        @Override
        public void open(OpenContext context) {
            state = getRuntimeContext().getState(
                    new ValueStateDescriptor<>("totals", Types.TUPLE(Types.LONG, Types.LONG)));
        }

        @Override
        public void processElement(
                Tuple3<K, Long, Long> row, Context context, Collector<Tuple4<K, Long, Long, Long>> out)
                throws Exception {
            Tuple2<Long, Long> old = state.value();
            Tuple2<Long, Long> now = old == null ? Tuple2.of(1L, row.f1) : Tuple2.of(old.f0 + 1, old.f1 + row.f1);
            state.update(now);
            out.collect(Tuple4.of(row.f0, now.f0, now.f1, row.f2));
        }
    }

    /** Discards rows and reports what came. */
    static final class Probe<K> implements Sink<Tuple4<K, Long, Long, Long>> {
        private final Keys<K> keys;
        private final String folder;
        private final long watchAfter;
        private final double skipS;
        private final boolean latency;

        Probe(Keys<K> keys, String folder, long watchAfter, boolean latency, double skipS) {
            this.keys = keys;
            this.folder = folder;
            this.watchAfter = watchAfter;
            this.latency = latency;
            this.skipS = skipS;
        }

        @Override
        public SinkWriter<Tuple4<K, Long, Long, Long>> createWriter(WriterInitContext context) {
            return new ProbeWriter<>(this, context.getTaskInfo().getIndexOfThisSubtask());
        }
    }

    static final class ProbeWriter<K> implements SinkWriter<Tuple4<K, Long, Long, Long>> {
        private final Probe<K> probe;
        private final int subtask;
        private final long countFromNs;
        private final long[] counts = new long[KEYS];
        private final long[] sums = new long[KEYS];
        private final long[] histogram;
        private long rows;

        ProbeWriter(Probe<K> probe, int subtask) {
            this.probe = probe;
            this.subtask = subtask;
            this.countFromNs = System.nanoTime() + (long) (probe.skipS * 1e9);
            this.histogram = new long[probe.latency ? BUCKETS : 0];
        }

        @Override
        public void write(Tuple4<K, Long, Long, Long> row, Context context) {
            if (++rows > probe.watchAfter) {
                int key = probe.keys.number(row.f0);
                counts[key] = row.f1;
                sums[key] = row.f2;
            }
            if (probe.latency) {
                long nowNs = System.nanoTime();
                if (nowNs >= countFromNs) {
                    histogram[(int) Math.min((nowNs - row.f3) / BUCKET_NS, BUCKETS - 1)]++;
                }
            }
        }

        @Override
        public void flush(boolean endOfInput) {
            if (endOfInput) {
                Harness.inputEnded();
            }
        }

        @Override
        public void close() throws IOException {
            Harness.sunk(rows);
            Harness.store(probe.folder, "state-" + subtask + ".bin", counts, sums);
            if (probe.latency) {
                Harness.store(probe.folder, "latency-" + subtask + ".bin", histogram);
            }
        }
    }

    static <K> void build(StreamExecutionEnvironment environment, Map<String, String> options, Keys<K> keys, long rows) {
        double rate = Double.parseDouble(options.getOrDefault("rate", "0"));
        GeneratorFunction<Long, Long> number = row -> row;
        DataStream<Long> numbers = rate > 0
                ? environment.fromSource(
                        new DataGeneratorSource<>(number, rows, RateLimiterStrategy.perSecond(rate), Types.LONG),
                        WatermarkStrategy.noWatermarks(), "gen")
                : environment.fromSource(
                        new NumberSequenceSource(0, rows - 1), WatermarkStrategy.noWatermarks(), "gen");
        double skipS = Double.parseDouble(options.getOrDefault("skip_s", "0"));
        long watchAfter = Long.parseLong(options.get("watch_after"));
        numbers.map(new Row<>(keys, rate > 0))
                .returns(Types.TUPLE(keys.type(), Types.LONG, Types.LONG))
                .keyBy(row -> row.f0, keys.type())
                .process(new CountAndSum<>())
                .returns(Types.TUPLE(keys.type(), Types.LONG, Types.LONG, Types.LONG))
                .sinkTo(new Probe<>(keys, options.get("folder"), watchAfter, rate > 0, skipS));
    }

    public static void main(String[] arguments) throws Exception {
        Map<String, String> options = Harness.options(arguments);
        Keys<?> keys = options.getOrDefault("keys", "int64").equals("text") ? new TextKeys() : new Int64Keys();
        Harness.main(options, (environment, rows) -> build(environment, options, keys, rows), () -> "");
    }
}
