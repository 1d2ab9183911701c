;;;; Handles: what they have in common, how they end, and what becomes of them when they are forgotten.

(in-package #:pelton)

(defstruct (handle (:constructor nil) (:copier nil) (:predicate nil))
  "What pelton has made. One thread at a time uses it, unless it says otherwise."
  (address 0 :type word)
  ;; Never sleeps: made with :wait :spin.
  (spins nil)
  ;; Closes what is at the address, and answers as ATTEMPT does. Must not lead to the handle.
  (shut #'shut :type function)
  ;; Something is reserved.
  (reserved nil)
  ;; The PEER-DIED-ERROR that the library has told, once perhaps, and nobody was told.
  (untold nil))

(defmethod print-object ((handle handle) stream)
  (print-unreadable-object (handle stream :type t :identity t)
    (format stream "~:[closed~;open~]" (handle-open-p handle))))

(defmacro define-handle (name (&rest slots) documentation)
  (let ((constructor (intern (format nil "%MAKE-~a" name))))
    `(defstruct (,name (:include handle) (:constructor ,constructor) (:copier nil) (:predicate nil))
       ,documentation
       ,@slots)))

(define-condition forgotten (warning)
  ((kind :initarg :kind))
  (:documentation "A handle was not closed, and nothing leads to it any more. It has been closed now.")
  (:report (lambda (condition stream)
             (format stream "pelton: a ~(~a~) was forgotten, and is closed now: use WITH-~:*~a, or CLOSE-HANDLE"
                     (slot-value condition 'kind)))))

(defvar *handles* (make-hash-table :test 'eq :weakness :key :synchronized t) "All that are open.")

(defun shut (address)
  (attempt (%close address)))

(defun adopt (handle)
  "Has the handle closed when it is forgotten, or when the image is saved. To be called without interrupts."
  (let ((address (handle-address handle)) (shut (handle-shut handle)) (kind (type-of handle)))
    (sb-ext:finalize handle
                     (lambda ()
                       (funcall shut address)
                       (warn 'forgotten :kind kind))
                     :dont-save t)
    (setf (gethash handle *handles*) t)
    handle))

(defun handle-open-p (handle)
  "Whether the handle has not been closed."
  (plusp (handle-address handle)))

(defun take-address (handle)
  "The address of a handle that the caller closes, or 0. To be called without interrupts."
  (let ((address (handle-address handle)))
    (unless (zerop address)
      (setf (handle-address handle) 0)
      (sb-ext:cancel-finalization handle)
      (remhash handle *handles*))
    address))

(defun close-handle (handle)
  "Closes any handle, also after an error. What is closed already stays so. Waits for nothing, but closing appenders does: the sink has all of it
first, and what that does not take is lost, and told.
A sender's messages are all received before its receiver is told of the end. Nobody else may be using the handle.
Signals a PELTON-ERROR where the library does; it is closed all the same."
  (declare (type handle handle))
  (check (close-quietly handle))
  (values))

(defun close-quietly (handle)
  "As CLOSE-HANDLE, but answers as ATTEMPT does."
  (without-interrupts
    (let ((address (take-address handle)))
      (if (zerop address) 0 (funcall (handle-shut handle) address)))))

(defvar *missing* nil "Why a saved image that was started is without the library.")

(defun check-library ()
  (when *missing* (error "pelton: ~a" *missing*)))

(defmacro opening ((out &rest make) call)
  "Makes CALL, which writes a handle's address to the SAP OUT, and answers the handle made by MAKE, or what ATTEMPT answers. Without
interrupts, so that what has been opened is not lost."
  (let ((result (gensym "RESULT")))
    `(with-words (,out 1)
       (check-library)
       (without-interrupts
         (let ((,result (attempt ,call)))
           (if (eql ,result 0)
               (adopt (,@make :address (sap-ref-64 ,out 0)))
               ,result))))))

(defmacro with-handle ((variable (open &rest arguments)) &body body)
  "Runs BODY with VARIABLE bound to the handle that OPEN makes, which is closed however BODY is left: interrupts are looked at while OPEN waits, and
in BODY, and not between. What closing tells is signalled if BODY ends normally, else a warning."
  (let ((closed (gensym "CLOSED")) (ended (gensym "ENDED")) (given (gensym "ARGUMENTS")))
    `(let ((,given (list ,@arguments)) (,closed 0) (,ended nil))
       (multiple-value-prog1
           (without-interrupts
             (let ((,variable (allow-with-interrupts (apply #',open ,given))))
               (unwind-protect (with-local-interrupts (multiple-value-prog1 (progn ,@body) (setf ,ended t)))
                 (setf ,closed (close-quietly ,variable))
                 (unless (or ,ended (eql ,closed 0))
                   (warn "closing ~a: ~a" ,variable ,closed)))))
         (check ,closed)))))

;;; ---- Telling, with restarts

(defun note (handle result)
  "RESULT, or nil if it says that the peer of HANDLE has died: that is remembered, for an interrupt may unwind before it is signalled."
  (if (typep result 'peer-died-error)
      (progn (setf (handle-untold handle) result) nil)
      result))

(defun persist (function handle what)
  "Calls FUNCTION, which answers as ATTEMPT does, and answers its number. Signals PELTON_AGAIN and what is below, with restarts: all but the
last of them call it again. HANDLE is what a successor may be waited for of, and what NOTE was called with; WHAT, unless it is nil, says what
DROP-MESSAGE does not do, and then the answer is nil."
  (declare (type function function) (dynamic-extent function))
  (loop
    (let* ((result (or (and handle (handle-untold handle)) (funcall function) (handle-untold handle)))
           (condition (cond ((eql result +again+) (make-condition 'timed-out :code +again+))
                            ((typep result 'condition) result)
                            (t (return result)))))
      (when handle (setf (handle-untold handle) nil))
      (flet ((if-it-is (type) (lambda (asked) (declare (ignore asked)) (typep condition type))))
        (restart-case (with-interrupts (error condition))
          (wait-longer ()
            :test (lambda (asked) (funcall (if-it-is 'timed-out) asked))
            :report "Wait as long again.")
          (resume-channel ()
            :test (lambda (asked) (and handle (funcall (if-it-is 'peer-died-error) asked)))
            :report "Wait for a successor of the other side."
            (resume handle))
          (try-again ()
            :test (lambda (asked) (funcall (if-it-is '(or sink-error no-space-error system-error)) asked))
            :report "Try the same again.")
          (drop-message ()
            :test (lambda (asked) (declare (ignore asked)) what)
            :report (lambda (stream) (format stream "Do not ~a it." what))
            (return nil)))))))

(defmacro persisting ((&key handle what) &body body)
  "BODY answers as ATTEMPT does: see PERSIST."
  `(flet ((body () ,@body))
     (declare (dynamic-extent #'body))
     (persist #'body ,handle ,what)))

;;; ---- What several kinds do

(defun resume (handle &key timeout)
  "After PEER-DIED-ERROR: waits up to TIMEOUT seconds, nil for ever, until the other side has a successor, and goes on with that: a
sender's unreleased messages are delivered again. Interrupts are looked at 20 times a second. Signals TIMED-OUT with the restart WAIT-LONGER;
REFUSED-ERROR where the channel has not lost its peer, or cannot have a successor."
  (declare (type handle handle))
  ;; Who asks for a successor knows.
  (setf (handle-untold handle) nil)
  (persisting ()
    (attempt-waiting ((handle-address handle) (handle-spins handle) timeout deadline :arm nil)
      (%resume (handle-address handle) deadline)))
  handle)

(defun drain (sender &key timeout)
  "Waits up to TIMEOUT seconds, nil for ever, until the receiver has released every message. Signals TIMED-OUT with the restart
WAIT-LONGER, and a CHANNEL-ENDED."
  (declare (type handle sender))
  (persisting ()
    (attempt-waiting ((handle-address sender) (handle-spins sender) timeout deadline :arm nil)
      (%drain (handle-address sender) deadline)))
  sender)

(defun sync (handle)
  "Has what was sent, released, flushed or appended written to the disk, by a sender, receiver, flushing or appenders. Waits for the disk.
Signals REFUSED-ERROR of a channel that is not by path; of a flushing or appenders as FLUSH."
  (declare (type handle handle))
  (check (with-cause (attempt (%sync (handle-address handle))) handle))
  handle)

(defun descriptor (handle)
  "The file descriptor that SB-SYS:WAIT-UNTIL-FD-USABLE and the like may watch for reading, of whatever can be waited for."
  (declare (type handle handle))
  ;; What the caller alone leads to must not be found forgotten meanwhile.
  (with-pinned-objects (handle)
    (check (attempt (%fd (handle-address handle))))))

(defun info (handle)
  "Figures of a sender, receiver, client or service: a property list. Sizes are in bytes."
  (declare (type handle handle))
  (with-words (sap 16)
    (setf (sap-ref-32 sap 0) 128)
    (with-pinned-objects (handle)
      (check (attempt (%get-info (handle-address handle) sap))))
    (list :peer-p (= (sap-ref-32 sap 4) 1) :peer-pid (sap-ref-32 sap 8) :peer-uid (sap-ref-32 sap 12)
          :next-seq (sap-ref-32 sap 16) :generation (sap-ref-32 sap 20) :capacity (sap-ref-64 sap 24)
          :message-bytes-max (sap-ref-64 sap 32) :unreleased (sap-ref-64 sap 40) :messages (sap-ref-64 sap 48)
          :bytes (sap-ref-64 sap 56) :waits (sap-ref-64 sap 64) :sleeps (sap-ref-64 sap 72) :wakes-sent (sap-ref-64 sap 80)
          :depth-max (sap-ref-64 sap 88) :calls (sap-ref-64 sap 96) :dropped (sap-ref-64 sap 104) :corrupt (sap-ref-64 sap 112)
          :services (sap-ref-64 sap 120))))
