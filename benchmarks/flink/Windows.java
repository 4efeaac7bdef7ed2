import java.time.Duration;
import java.util.Map;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.AggregateFunction;
import org.apache.flink.api.common.functions.MapFunction;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.connector.sink2.Sink;
import org.apache.flink.api.connector.sink2.SinkWriter;
import org.apache.flink.api.connector.sink2.WriterInitContext;
import org.apache.flink.api.connector.source.lib.NumberSequenceSource;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.api.java.tuple.Tuple4;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.windowing.ProcessWindowFunction;
import org.apache.flink.streaming.api.windowing.assigners.TumblingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.windows.TimeWindow;
import org.apache.flink.util.Collector;

/**
 * Count and sum by key in windows of one second of event time, on Flink: DataStream API, see {@link Harness}.
 *
 * <p>The source's numbers are dealt out to its two subtasks in halves; {@link Row} makes them even and odd rows, so that
 * both go through the same event time together.
 */
public final class Windows {
    static final int KEYS = 100_000;
    static final int ROWS_PER_MS = 1_000;
    static final int DISORDER_MS = 10;

    /** What the sinks saw: rows in the windows, and the digest of all results. */
    private static final AtomicLong COUNTED = new AtomicLong();

    private static final AtomicLong DIGEST = new AtomicLong();

    private Windows() {}

    /** Number of the source to (key, value, event time in milliseconds). */
    static final class Row implements MapFunction<Long, Tuple3<Long, Long, Long>> {
        private final long half;
        private boolean noted;

        Row(long rows) {
            this.half = (rows + 1) / 2;
        }

        @Override
        public Tuple3<Long, Long, Long> map(Long number) {
            if (!noted) {
                noted = true;
                Harness.emitted(System.nanoTime());
            }
            long row = number < half ? 2 * number : 2 * (number - half) + 1;
            long mixed = Harness.mix(row);
            long timeMs = Math.max(0, row / ROWS_PER_MS - (mixed >>> 40) % DISORDER_MS);
            return Tuple3.of(Long.remainderUnsigned(mixed, KEYS), row, timeMs);
        }
    }

    static final class CountAndSum
            implements AggregateFunction<Tuple3<Long, Long, Long>, Tuple2<Long, Long>, Tuple2<Long, Long>> {
        @Override
        public Tuple2<Long, Long> createAccumulator() {
            return Tuple2.of(0L, 0L);
        }

        @Override
        public Tuple2<Long, Long> add(Tuple3<Long, Long, Long> row, Tuple2<Long, Long> totals) {
            totals.f0++;
            totals.f1 += row.f1;
            return totals;
        }

        @Override
        public Tuple2<Long, Long> getResult(Tuple2<Long, Long> totals) {
            return totals;
        }

        @Override
        public Tuple2<Long, Long> merge(Tuple2<Long, Long> a, Tuple2<Long, Long> b) {
            return Tuple2.of(a.f0 + b.f0, a.f1 + b.f1);
        }
    }

    /** (key, begin of the window in milliseconds, count, sum). */
    static final class WithWindow
            extends ProcessWindowFunction<Tuple2<Long, Long>, Tuple4<Long, Long, Long, Long>, Long, TimeWindow> {
        @Override
        public void process(
                Long key,
                Context context,
                Iterable<Tuple2<Long, Long>> totals,
                Collector<Tuple4<Long, Long, Long, Long>> out) {
            Tuple2<Long, Long> only = totals.iterator().next();
            out.collect(Tuple4.of(key, context.window().getStart(), only.f0, only.f1));
        }
    }

    /** Discards results and reports what came. */
    static final class Tally implements Sink<Tuple4<Long, Long, Long, Long>> {
        @Override
        public SinkWriter<Tuple4<Long, Long, Long, Long>> createWriter(WriterInitContext context) {
            return new TallyWriter();
        }
    }

    static final class TallyWriter implements SinkWriter<Tuple4<Long, Long, Long, Long>> {
        private long results;
        private long counted;
        private long digest;

        @Override
        public void write(Tuple4<Long, Long, Long, Long> result, Context context) {
            results++;
            counted += result.f2;
            long named = Harness.mix(Harness.mix(result.f0) + result.f1);
            digest += Harness.mix(Harness.mix(named + result.f2) + result.f3);
        }

        @Override
        public void flush(boolean endOfInput) {
            if (endOfInput) {
                Harness.inputEnded();
            }
        }

        @Override
        public void close() {
            Harness.sunk(results);
            COUNTED.addAndGet(counted);
            DIGEST.addAndGet(digest);
        }
    }

    static void build(StreamExecutionEnvironment environment, long rows) {
        environment.fromSource(new NumberSequenceSource(0, rows - 1), WatermarkStrategy.noWatermarks(), "gen")
                .map(new Row(rows))
                .returns(Types.TUPLE(Types.LONG, Types.LONG, Types.LONG))
                .assignTimestampsAndWatermarks(WatermarkStrategy
                        .<Tuple3<Long, Long, Long>>forBoundedOutOfOrderness(Duration.ofMillis(DISORDER_MS))
                        .withTimestampAssigner((row, before) -> row.f2))
                .keyBy(row -> row.f0, Types.LONG)
                .window(TumblingEventTimeWindows.of(Duration.ofSeconds(1)))
                .aggregate(
                        new CountAndSum(),
                        new WithWindow(),
                        Types.TUPLE(Types.LONG, Types.LONG),
                        Types.TUPLE(Types.LONG, Types.LONG),
                        Types.TUPLE(Types.LONG, Types.LONG, Types.LONG, Types.LONG))
                .sinkTo(new Tally());
    }

    /** Asked after each job; the next one begins at zero. */
    private static String findings() {
        return String.format(", \"counted\": %d, \"digest\": %d", COUNTED.getAndSet(0), DIGEST.getAndSet(0));
    }

    public static void main(String[] arguments) throws Exception {
        Map<String, String> options = Harness.options(arguments);
        Harness.main(options, Windows::build, Windows::findings);
    }
}
