import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import org.apache.flink.api.connector.sink2.Sink;
import org.apache.flink.api.connector.sink2.SinkWriter;
import org.apache.flink.api.connector.sink2.WriterInitContext;
import org.apache.flink.configuration.ConfigOption;
import org.apache.flink.table.connector.ChangelogMode;
import org.apache.flink.table.connector.sink.DynamicTableSink;
import org.apache.flink.table.connector.sink.SinkV2Provider;
import org.apache.flink.table.data.GenericRowData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.data.binary.BinaryStringData;
import org.apache.flink.table.factories.DynamicTableSinkFactory;
import org.apache.flink.table.types.logical.LogicalType;
import org.apache.flink.table.types.logical.LogicalTypeRoot;
import org.apache.flink.table.types.logical.RowType;
import org.apache.flink.types.RowKind;

/**
 * A table that discards rows and adds up each column: numbers, times in milliseconds since 1970, bytes of texts. With a
 * primary key, its first column, only the newest row of each key counts.
 */
public final class TallyTable implements DynamicTableSinkFactory {
    /** Sums by column, whole ones and others, over all subtasks; they live in this very process. */
    private static long[] whole = {};

    private static double[] fractions = {};
    private static List<String> names = List.of();
    private static boolean[] isFraction = {};

    @Override
    public String factoryIdentifier() {
        return "tally";
    }

    @Override
    public Set<ConfigOption<?>> requiredOptions() {
        return Set.of();
    }

    @Override
    public Set<ConfigOption<?>> optionalOptions() {
        return Set.of();
    }

    @Override
    public DynamicTableSink createDynamicTableSink(Context context) {
        RowType type = (RowType) context.getPhysicalRowDataType().getLogicalType();
        boolean keyed = context.getCatalogTable().getResolvedSchema().getPrimaryKey().isPresent();
        return new Table(type, keyed);
    }

    /** A JSON object of the sums, asked after each job; the next one begins at zero. */
    static synchronized String sums() {
        String found = IntStream.range(0, names.size())
                .mapToObj(i -> "\"" + names.get(i) + "\": " + (isFraction[i] ? fractions[i] : (Object) whole[i]))
                .collect(Collectors.joining(", ", "{", "}"));
        whole = new long[names.size()];
        fractions = new double[names.size()];
        return found;
    }

    private static synchronized void add(Writer writer) {
        if (whole.length != writer.types.length) {
            whole = new long[writer.types.length];
            fractions = new double[writer.types.length];
            isFraction = new boolean[writer.types.length];
        }
        names = writer.names;
        for (int i = 0; i < whole.length; i++) {
            isFraction[i] = writer.types[i] == LogicalTypeRoot.DOUBLE;
            whole[i] += writer.wholeSums[i];
            fractions[i] += writer.fractionSums[i];
        }
    }

    record Table(RowType type, boolean keyed) implements DynamicTableSink {
        @Override
        public ChangelogMode getChangelogMode(ChangelogMode requested) {
            return keyed ? ChangelogMode.upsert() : ChangelogMode.insertOnly();
        }

        @Override
        public SinkRuntimeProvider getSinkRuntimeProvider(Context context) {
            return SinkV2Provider.of(new Tally(List.copyOf(type.getFieldNames()), List.copyOf(type.getChildren()), keyed));
        }

        @Override
        public DynamicTableSink copy() {
            return this;
        }

        @Override
        public String asSummaryString() {
            return "tally";
        }
    }

    record Tally(List<String> names, List<LogicalType> types, boolean keyed) implements Sink<RowData> {
        @Override
        public SinkWriter<RowData> createWriter(WriterInitContext context) {
            return new Writer(this);
        }
    }

    static final class Writer implements SinkWriter<RowData> {
        private final List<String> names;
        private final LogicalTypeRoot[] types;
        private final boolean keyed;
        private final Map<Long, RowData> newest = new HashMap<>();
        private final long[] wholeSums;
        private final double[] fractionSums;
        private long rows;

        Writer(Tally tally) {
            names = tally.names;
            types = tally.types.stream().map(LogicalType::getTypeRoot).toArray(LogicalTypeRoot[]::new);
            keyed = tally.keyed;
            wholeSums = new long[types.length];
            fractionSums = new double[types.length];
        }

        @Override
        public void write(RowData row, Context context) {
            rows++;
            if (!keyed) {
                sum(row);
            } else if (row.getRowKind() == RowKind.DELETE) {
                newest.remove(row.getLong(0));
            } else {
                newest.put(row.getLong(0), copy(row));
            }
        }

        /** Rows are used again by their sender. */
        private RowData copy(RowData row) {
            GenericRowData kept = new GenericRowData(types.length);
            for (int i = 0; i < types.length; i++) {
                kept.setField(i, types[i] == LogicalTypeRoot.DOUBLE ? (Object) row.getDouble(i) : (Object) row.getLong(i));
            }
            return kept;
        }

        private void sum(RowData row) {
            for (int i = 0; i < types.length; i++) {
                switch (types[i]) {
                    case BIGINT -> wholeSums[i] += row.getLong(i);
                    case DOUBLE -> fractionSums[i] += row.getDouble(i);
                    case TIMESTAMP_WITHOUT_TIME_ZONE -> wholeSums[i] += row.getTimestamp(i, 3).getMillisecond();
                    default -> wholeSums[i] += ((BinaryStringData) row.getString(i)).getSizeInBytes();
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
        public void close() {
            newest.values().forEach(this::sum);
            Harness.sunk(rows);
            add(this);
        }
    }
}
